// The scratch of the experts' CUDA kernels. It depends only on the arguments of a call, so a plan counts it without
// a GPU. This is host code and part of every build.
#pragma once

#include <cstdint>

#include "ops/experts/experts.h"

namespace moebius::cuda {

// expert_wgrad into a bf16 dw needs scratch for f32 sums: kWgradTileBytes for each of at most kMaxWgradBlocks blocks.
inline constexpr int64_t kMaxWgradBlocks = 144, kWgradTileBytes = 128 * 256 * 4;

// d_expert_down sums <g, a> over tiles of kDWeightCols columns of F. The f32 partial[tile, r] are in the scratch, and
// are added in the order of the tiles.
inline constexpr int64_t kDWeightCols = 64;
inline int64_t num_dweight_partials(const DExpertDown& a) { return div_ceil(a.sa_RF.dim(1), kDWeightCols); }

}  // namespace moebius::cuda
