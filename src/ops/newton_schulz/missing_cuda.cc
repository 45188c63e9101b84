// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/newton_schulz/newton_schulz_backends.h"

namespace moebius::cuda {

void add_scaled(Stream&, const AddScaled&) { missing_cuda("add_scaled"); }

}  // namespace moebius::cuda
