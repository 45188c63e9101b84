// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/mla/mla_backends.h"

namespace moebius::cuda {

void rotate_heads(Stream&, const RotateHeads&) { missing_cuda("rotate_heads"); }
void latent_kv_fwd(Stream&, const LatentKvFwd&) { missing_cuda("latent_kv_fwd"); }
void latent_kv_bwd(Stream&, const LatentKvBwd&) { missing_cuda("latent_kv_bwd"); }

}  // namespace moebius::cuda
