// A reduce-scatter over levels in memory of a fixed size, for groups whose messages can have several spans. The parts
// of the ranks are sent from where they are, in rank order, and are not packed.
//
// At level 0 a member gets its block: the parts of all ranks with its digit, in the order of CollectiveLevels::place.
// A rank copies its own block to the memory; the blocks of the others are sent from `in`. What arrives for this rank's
// block takes the places of the others' blocks. Sums of bf16 between levels are f32, and need more memory.
#pragma once

#include <functional>

#include "comm/level_collectives.h"

namespace moebius {

struct PartCalls {
  LevelCalls levels;
  // Sends the spans to[d] to member d of the step, and fills the spans from[d] with those that it sends, in this order.
  // This rank's own spans are not read or written.
  std::function<void(const LevelStep& step, const std::vector<Spans>& to, const std::vector<Spans>& from)> exchange;
  std::function<void(const Span& to, const Span& from)> copy;
};

// Returns the bytes that a sum of num_elements for each rank needs, in memory aligned to 16 bytes.
int64_t sum_bytes(const CollectiveLevels& levels, int64_t num_elements, DType dtype);
// Returns the largest number of elements for each rank whose sum fits in num_bytes, down to a multiple of 16 if it is
// above 16; 0 if none fits. It is `wanted` if that fits.
int64_t elements_that_fit(const CollectiveLevels& levels, int64_t wanted, DType dtype, int64_t num_bytes);
// Returns the memory of a sum over levels of num_elements in all.
LevelMemory level_memory(const CollectiveLevels& levels, int64_t num_elements, DType dtype, std::byte* memory);

// Computes out = the sum over the ranks of this rank's part of in, which has out's elements for each rank.
// memory is used in pieces; its part for bf16 is aligned to 16 bytes first.
// REQUIRES: elements_that_fit() of that memory is not 0, or out is empty.
void reduce_parts(const PartCalls& calls, const CollectiveLevels& levels, int rank, const Tensor& out, const Tensor& in,
                  Span memory);
// Returns the part of memory that begins at its first address aligned for sums of dtype.
Span aligned_for(DType dtype, Span memory);

}  // namespace moebius
