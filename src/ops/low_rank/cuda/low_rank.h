// The interface between the CUDA files of the low-rank products. The generic kernels support every shape; for those of
// sm_80 (mma.sync), takes() says which shapes they support. Host code only.
#pragma once

#include "ops/low_rank/low_rank.h"

namespace moebius::cuda {

// Shared-memory tiles, f32 and bf16, any shape.
namespace generic {
void low_rank_product(Stream& s, const LowRankProduct& a);
void low_rank_wgrad(Stream& s, const LowRankWgrad& a);
}  // namespace generic

// For any GPU of compute capability 8.0 and later: bf16, any columns. takes() looks at shapes and dtypes only, so its
// answer is the same in every step.
namespace sm80 {
bool takes(const LowRankProduct& a);
bool takes(const LowRankWgrad& a);
void low_rank_product(Stream& s, const LowRankProduct& a);
void low_rank_wgrad(Stream& s, const LowRankWgrad& a);
}  // namespace sm80

}  // namespace moebius::cuda
