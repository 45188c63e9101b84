// Replaces the CUDA backend of these ops in a build without it.
#include "ops/activation/activation_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void swiglu_fwd(Stream&, const SwigluFwd&) { missing_cuda("swiglu_fwd"); }
void swiglu_bwd(Stream&, const SwigluBwd&) { missing_cuda("swiglu_bwd"); }

}  // namespace moebius::cuda
