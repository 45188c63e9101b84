// Replaces the CUDA backend of this op in a build without it.
#include "ops/draw/draw_backends.h"
#include "ops/missing_backend.h"

namespace moebius::cuda {

void draw_tokens(Stream&, const DrawTokens&) { missing_cuda("draw_tokens"); }

}  // namespace moebius::cuda
