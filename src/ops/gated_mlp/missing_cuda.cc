// Replaces the CUDA backend of these ops in a build without it.
#include "ops/gated_mlp/gated_mlp_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void gated_up(Stream&, const GatedUp&) { missing_cuda("gated_up"); }
void d_gated_down(Stream&, const DGatedDown&) { missing_cuda("d_gated_down"); }

}  // namespace moebius::cuda
