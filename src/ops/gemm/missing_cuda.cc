// The CUDA backend of these ops in a build without it.
#include "ops/backends.h"

namespace moebius::cuda {

void gemm(Stream&, const Gemm&) { missing_cuda("gemm"); }

}  // namespace moebius::cuda
