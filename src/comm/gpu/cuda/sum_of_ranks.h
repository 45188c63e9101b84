// The sum of a collective over ranks on a GPU, in their order, with the bits of comm/rank_order_sum.h.
#pragma once

#include "comm/rank_parts.h"
#include "device/device.h"

namespace moebius::cuda {

// Writes the sum of the parts of all ranks to out, on `stream` (a cudaStream_t). bf16 is added in f32 and
// rounded once. out has the dtype of the parts, or is the f32 sum of bf16 parts, or the bf16 sum of f32 parts.
// out may be parts.own if both have one dtype.
// REQUIRES: can_sum(parts.dtype), parts.count > 0.
void sum_of_ranks(void* stream, Tensor out, const RankParts& parts);

}  // namespace moebius::cuda
