#include "ops/missing_backend.h"

#include "core/error.h"

namespace moebius {

void missing_cuda(const char* op) {
  MOEBIUS_FAIL(usage, "{}: this build has no CUDA backend; set run.device = \"cpu\"", op);
}

}  // namespace moebius
