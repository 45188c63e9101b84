// The CUDA backend of these ops in a build without it.
#include "ops/backends.h"
#include "ops/clamp/backends.h"

namespace moebius::cuda {

void clamp_fwd(Stream&, const ClampFwd&) { missing_cuda("clamp_fwd"); }
void clamp_bwd(Stream&, const ClampBwd&) { missing_cuda("clamp_bwd"); }

}  // namespace moebius::cuda
