// The sum of comm/rank_order_sum.h on a GPU, with the same bits.
#pragma once

#include <cstdint>

#include "device/device.h"

namespace moebius::cuda {

// The parts that the ranks of a group have for this rank:
// its own, and the others by rank, stride_bytes apart.
struct RankParts {
  const void* own = nullptr;
  const void* arrived = nullptr;  // begins with the part of rank 0; the place of own_rank is not read
  int64_t stride_bytes = 0;
  int own_rank = 0, size = 1;
};

// out = part of rank 0 + part of rank 1 + ..., on `stream` (a cudaStream_t).
// out may be parts.own. Sums as in rank_order_sum.h.
void sum_in_rank_order(void* stream, Tensor out, const RankParts& parts);

}  // namespace moebius::cuda
