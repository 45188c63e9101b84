// Replaces the CUDA backend of these ops in a build without it.
#include "ops/clamp/clamp_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void clamp_fwd(Stream&, const ClampFwd&) { missing_cuda("clamp_fwd"); }
void clamp_bwd(Stream&, const ClampBwd&) { missing_cuda("clamp_bwd"); }

}  // namespace moebius::cuda
