// Replaces the CUDA backend of these ops in a build without it.
#include "ops/missing_backend.h"
#include "ops/rope/rope_backends.h"

namespace moebius::cuda {

void rope_table(Stream&, const RopeTable&) { missing_cuda("rope_table"); }
void rope_fwd(Stream&, const RopeFwd&) { missing_cuda("rope_fwd"); }
void rope_bwd(Stream&, const RopeBwd&) { missing_cuda("rope_bwd"); }

}  // namespace moebius::cuda
