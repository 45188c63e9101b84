// These ops have no CUDA kernels yet.
#include "core/error.h"
#include "ops/mla/backends.h"

namespace moebius::cuda {
namespace {

[[noreturn]] void fail(const char* op) {
  MOEBIUS_FAIL(usage, "{}: latent attention has no CUDA kernels yet; set run.device = \"cpu\"", op);
}

}  // namespace

void rotate_heads(Stream&, const RotateHeads&) { fail("rotate_heads"); }
void latent_kv_fwd(Stream&, const LatentKvFwd&) { fail("latent_kv_fwd"); }
void latent_kv_bwd(Stream&, const LatentKvBwd&) { fail("latent_kv_bwd"); }

}  // namespace moebius::cuda
