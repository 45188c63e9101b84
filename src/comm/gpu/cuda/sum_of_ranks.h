// The sum over all ranks of a group at once on a GPU, with the bits of comm/message_group.h: in the order of
// the ranks, or over the levels of comm/collective_levels.h.
#pragma once

#include <cstdint>

#include "comm/collective_levels.h"
#include "device/device.h"

namespace moebius::cuda {

// The parts that the ranks of a group have for this rank:
// its own, and the others by rank, stride_bytes apart.
struct RankParts {
  const void* own = nullptr;
  const void* arrived = nullptr;  // begins with the part of rank 0; the place of own_rank is not read
  int64_t stride_bytes = 0;
  int own_rank = 0;
};

// Writes the sum of the parts of all ranks to out, on `stream` (a cudaStream_t). bf16 is added in f32 and
// rounded once. out may be parts.own.
// REQUIRES: can_sum(out.dtype), at most 8 levels.
void sum_of_ranks(void* stream, Tensor out, const RankParts& parts, const CollectiveLevels& levels);

}  // namespace moebius::cuda
