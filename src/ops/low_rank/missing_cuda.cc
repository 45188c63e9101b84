// Replaces the CUDA backend of these ops in a build without it.
#include "ops/low_rank/low_rank_backends.h"
#include "ops/low_rank/low_rank_dropout.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void low_rank_product(Stream&, const LowRankProduct&) { missing_cuda("low_rank_product"); }
void low_rank_wgrad(Stream&, const LowRankWgrad&) { missing_cuda("low_rank_wgrad"); }
void low_rank_block(Stream&, const LowRankBlock&) { missing_cuda("low_rank_block"); }
void low_rank_activation(Stream&, const LowRankActivation&) { missing_cuda("low_rank_activation"); }
void d_low_rank_activation(Stream&, const DLowRankActivation&) { missing_cuda("d_low_rank_activation"); }
void row_tokens(Stream&, const RowTokens&) { missing_cuda("row_tokens"); }
void low_rank_dropout(Stream&, const LowRankDropout&) { missing_cuda("low_rank_dropout"); }

}  // namespace moebius::cuda
