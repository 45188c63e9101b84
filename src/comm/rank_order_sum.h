// The sum of a collective over its ranks, in rank order. comm/gpu/cuda/sum_of_ranks.h is the same on a GPU.
#pragma once

#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

bool can_sum(DType dtype);  // returns true for f32, f64, i64 and bf16

// Computes
//   out[i] = ((parts[0][i] + parts[1][i]) + parts[2][i]) + ...
// with bf16 added in f32 and rounded once.
// Parts have out's elements and `dtype`; one of them may be out itself.
// out has the same dtype, or is the f32 sum of bf16 parts, or the bf16 sum of f32 parts: bf16 sums over several levels
// (comm/collective_levels.h) are rounded once, at the last level.
// REQUIRES: can_sum(dtype), at least one part.
void sum_in_rank_order(Stream& s, Tensor out, std::span<const void* const> parts, DType dtype);

}  // namespace moebius
