// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/qk_clip/qk_clip_backends.h"

namespace moebius::cuda {

void max_over_ranks(Stream&, const MaxOverRanks&) { missing_cuda("max_over_ranks"); }
void qk_clip(Stream&, const QkClip&) { missing_cuda("qk_clip"); }

}  // namespace moebius::cuda
