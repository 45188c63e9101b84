#include "device/out_of_memory.h"

namespace moebius {

// The texts are those of CUDA, cuBLASLt, cuDNN and NCCL.
bool is_out_of_memory(std::string_view words) {
  for (const char* each : {"out of memory", "ALLOC_FAILED", "ALLOCATION_FAILED", "Failed to malloc",
                           "Failed to CUDA calloc", "Failed to CUDA host alloc"})
    if (words.find(each) != std::string_view::npos) return true;
  return false;
}

void throw_library_error(ErrorKind kind, const std::string& what) {
  if (!is_out_of_memory(what)) throw Error(kind, what);
  throw OutOfMemory(what +
                    ": out of memory: the library's own memory did not fit beside the plan; stop other programs on "
                    "this GPU, or compute with smaller shapes");
}

}  // namespace moebius
