// This op has no CUDA kernels yet.
#include "core/error.h"
#include "ops/qk_norm/backends.h"

namespace moebius::cuda {
namespace {

[[noreturn]] void fail(const char* op) {
  MOEBIUS_FAIL(usage, "{}: q and k normed over all heads together have no CUDA kernel yet; set run.device = \"cpu\"",
               op);
}

}  // namespace

void qk_norm_fwd(Stream&, const QkNormFwd&) { fail("qk_norm_fwd"); }
void qk_norm_bwd(Stream&, const QkNormBwd&) { fail("qk_norm_bwd"); }

}  // namespace moebius::cuda
