#include "device/out_of_memory.h"

#include <fmt/format.h>

#include "device/pinned_memory.h"

namespace moebius {

OutOfPinnedMemory::OutOfPinnedMemory(int64_t num_bytes, const std::string& purpose, const std::string& why)
    : OutOfMemory(fmt::format(
          "out of pinned host memory: {:.3f} GiB were requested in one piece, {}{}; the GPU's own memory is not short: "
          "raise the memory limit of this container or group and its limit of locked memory (ulimit -l), or stop other "
          "programs that hold host memory",
          static_cast<double>(num_bytes) / 1073741824.0, purpose, why.empty() ? "" : fmt::format(" ({})", why))) {}

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
                    ": out of memory: the library's own memory did not fit next to the plan; stop other programs on "
                    "this GPU, or compute with smaller shapes");
}

}  // namespace moebius
