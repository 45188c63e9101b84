// The stand-ins for a CUDA backend that was not built (missing_cuda.cc of each op) end
// in this error.
#pragma once

namespace moebius {

// Throws Error{usage}, which names the op.
[[noreturn]] void missing_cuda(const char* op);

}  // namespace moebius
