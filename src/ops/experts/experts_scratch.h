// The scratch of the experts' CUDA kernels. It depends on the arguments of a call alone, so that a plan counts it without
// a GPU. Host code only, part of every build: each build plans the same.
#pragma once

#include <cstdint>

#include "ops/experts/experts.h"

namespace moebius::cuda {

// Scratch of expert_wgrad into a bf16 dw: the f32 sums of a tile for each block of a grid without a limit.
inline constexpr int64_t kMaxWgradBlocks = 144, kWgradTileBytes = 128 * 256 * 4;

// <g, a> of d_expert_down over tiles of this many columns of F: f32 partial[tile, r] in the
// scratch, added in order.
inline constexpr int64_t kDWeightCols = 64;
inline int64_t num_dweight_partials(const DExpertDown& a) { return div_ceil(a.sa_RF.dim(1), kDWeightCols); }

}  // namespace moebius::cuda
