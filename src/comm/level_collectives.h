// Collectives over the levels of comm/collective_levels.h, for groups of any transport. They decide which slices go to
// whom at which level, and which sums are rounded when; the group exchanges the slices and adds them.
//
// The slices of a tensor x_N are its parts for the ranks, as equal as possible, in the order of
// CollectiveLevels::place.
#pragma once

#include <functional>
#include <vector>

#include "comm/collective_levels.h"
#include "comm/rank_parts.h"

namespace moebius {

struct LevelCalls {
  // Sends to[d] to member d of the step, and fills from[d] from it. It copies this rank's own span, unless both are the
  // same memory.
  std::function<void(const LevelStep& step, const Spans& to, const Spans& from)> exchange;
  // Sets out to the sum of the parts, in their order, as sum_in_rank_order does (comm/rank_order_sum.h).
  std::function<void(const Tensor& out, const RankParts& parts)> sum;
};

// Memory of a sum over levels, or the bytes that it needs.
template <class T>
struct OfLevels {
  T first{};  // for the parts that arrive at level 0
  T above{};  // for those that arrive at the levels above; it may begin where `first` does
  T sums{};   // for f32 sums of bf16 slices between levels, else unused; aligned to f32
};
using LevelMemory = OfLevels<std::byte*>;
// Returns the bytes for a sum of x_N with num_elements.
OfLevels<int64_t> level_bytes(const CollectiveLevels& levels, int64_t num_elements, DType dtype);

// Computes own = the sum over the members of their parts of `dtype` for this rank. to[d] is the part for member d; the
// parts of the others arrive at `arrived`, own.numel() elements apart. own may be this rank's part.
void sum_at_level(const LevelCalls& calls, const LevelStep& step, const Tensor& own, DType dtype, const Spans& to,
                  std::byte* arrived);
// Computes own = the sum over the ranks of this rank's slice of x_N, which is overwritten. own may be this slice.
// bf16 is summed in f32, and rounded at the last level.
void sum_over_levels(const LevelCalls& calls, const std::vector<LevelStep>& steps, const Tensor& own, const Tensor& x_N,
                     const LevelMemory& memory);
// Fills the slices of the other ranks.
void gather_over_levels(const LevelCalls& calls, const std::vector<LevelStep>& steps, const Tensor& x_N);
// Sets x = x of the rank root. It goes from the top level down: before a level, x is on the ranks whose lower digits,
// up to that of the level, equal the root's.
void broadcast_over_levels(const LevelCalls& calls, const CollectiveLevels& levels, int rank, int root,
                           const Tensor& x);

}  // namespace moebius
