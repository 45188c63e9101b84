// Replaces the CUDA part of this folder in builds without CUDA.
#include "comm/gpu/gpu_identity.h"
#include "core/error.h"

namespace moebius {

std::string gpu_identity(int) { MOEBIUS_FAIL(internal, "comm: a build without CUDA knows no GPU"); }

}  // namespace moebius
