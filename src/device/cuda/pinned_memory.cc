#include "device/pinned_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "device/cuda/cuda.h"
#include "device/cuda/pinning.h"
#include "device/out_of_memory.h"

namespace moebius::cuda {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20, kSmallPage = 4096;

[[noreturn]] void out_of_pinned_memory(int64_t num_bytes, const std::string& why) {
  cudaGetLastError();
  throw OutOfPinnedMemory(num_bytes, "which a GPU reads and writes where it is", why);
}

// The kernel allocates zeroed pages when they are first touched.
void touch_pages(char* p, int64_t num_bytes) {
  const int64_t num_pages = div_ceil(num_bytes, kHugePage), num_threads = std::min(num_available_cpus(), 16);
  std::vector<std::jthread> threads;
  for (int64_t t = 0; t < num_threads; ++t) {
    const auto touch = [=] {
      for (int64_t page = t; page < num_pages; page += num_threads)
        for (int64_t at = page * kHugePage; at < std::min(num_bytes, (page + 1) * kHugePage); at += kSmallPage)
          *static_cast<volatile char*>(p + at) = 0;
    };
    try {
      threads.emplace_back(touch);
    } catch (const std::system_error&) {  // the system starts no more threads
      touch();
    }
  }
}

}  // namespace

std::shared_ptr<void> map_pinned(int64_t num_bytes) {
  void* mapped = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) out_of_pinned_memory(num_bytes, std::string("mmap: ") + std::strerror(errno));
  const std::shared_ptr<void> memory(mapped, [num_bytes](void* p) { munmap(p, num_bytes); });
  madvise(mapped, num_bytes, MADV_HUGEPAGE);  // without huge pages in the kernel, pages are small
  touch_pages(static_cast<char*>(mapped), num_bytes);
  const cudaError_t status = cudaHostRegister(mapped, num_bytes, cudaHostRegisterPortable | cudaHostRegisterMapped);
  if (is_refused_pinning(status))
    out_of_pinned_memory(num_bytes, std::string("cudaHostRegister: ") + cudaGetErrorString(status));
  check_cuda(status, "cudaHostRegister");
  return {mapped, [memory](void* p) { cudaHostUnregister(p); }};
}

}  // namespace moebius::cuda
