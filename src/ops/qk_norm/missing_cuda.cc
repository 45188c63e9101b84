// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/qk_norm/qk_norm_backends.h"

namespace moebius::cuda {

void qk_norm_sums(Stream&, const QkNormSums&) { missing_cuda("qk_norm_sums"); }
void qk_norm_block_fwd(Stream&, const QkNormBlockFwd&) { missing_cuda("qk_norm_block_fwd"); }
void qk_norm_block_bwd(Stream&, const QkNormBlockBwd&) { missing_cuda("qk_norm_block_bwd"); }

}  // namespace moebius::cuda
