// The CUDA backend of these ops in a build without it.
#include "ops/backends.h"

namespace moebius::cuda {

void qk_norm_fwd(Stream&, const QkNormFwd&) { missing_cuda("qk_norm_fwd"); }
void qk_norm_bwd(Stream&, const QkNormBwd&) { missing_cuda("qk_norm_bwd"); }

}  // namespace moebius::cuda
