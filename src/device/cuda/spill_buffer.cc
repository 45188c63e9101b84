// Managed memory of which some parts stay on the GPU and the others on the host; the contract is in
// device/spill_buffer.h.
#include "device/spill_buffer.h"

#include <algorithm>
#include <memory>

#include "device/cuda/cuda.h"
#include "device/out_of_memory.h"

namespace moebius::cuda {
namespace {

void check_gpu(int gpu) {
  int concurrent = 0;
  MOEBIUS_CUDA(cudaDeviceGetAttribute(&concurrent, cudaDevAttrConcurrentManagedAccess, gpu));
  MOEBIUS_CHECK(usage, concurrent != 0,
                "rows of experts beyond memory.expert_rows need a GPU that uses memory of the host in place, which the "
                "driver of GPU {} does not offer; set memory.expert_rows = 0, which plans for the worst case",
                gpu);
}

int64_t sum_of(const std::vector<SpillBuffer::Range>& ranges) {
  int64_t sum = 0;
  for (const SpillBuffer::Range& range : ranges) sum += range.num_bytes;
  return sum;
}

// Pages that do not fit into the GPU would stay on the host without an error, and be slow.
void check_free(int64_t num_bytes) {
  size_t free = 0, total = 0;
  MOEBIUS_CUDA(cudaMemGetInfo(&free, &total));
  if (num_bytes <= static_cast<int64_t>(free)) return;
  throw OutOfMemory(
      fmt::format("out of device memory: {:.3f} GiB were requested for rows of experts, {:.3f} of {:.3f} GiB are free; "
                  "stop other programs on this GPU, or compute with smaller shapes",
                  num_bytes / 1073741824.0, free / 1073741824.0, total / 1073741824.0));
}

}  // namespace

void* allocate_spilling(int64_t num_bytes, const std::vector<SpillBuffer::Range>& near) {
  int gpu = 0;
  MOEBIUS_CUDA(cudaGetDevice(&gpu));
  check_gpu(gpu);
  check_free(sum_of(near));
  void* data = nullptr;
  MOEBIUS_CUDA(cudaMallocManaged(&data, num_bytes));
  std::unique_ptr<void, void (*)(void*)> owned(data, [](void* p) { cudaFree(p); });
  const cudaMemLocation here{.type = cudaMemLocationTypeDevice, .id = gpu}, host{.type = cudaMemLocationTypeHost};
  MOEBIUS_CUDA(cudaMemAdvise(data, num_bytes, cudaMemAdviseSetPreferredLocation, host));
  MOEBIUS_CUDA(cudaMemAdvise(data, num_bytes, cudaMemAdviseSetAccessedBy, here));
  for (const SpillBuffer::Range& range : near) {
    if (range.num_bytes == 0) continue;
    char* begin = static_cast<char*>(data) + range.begin;
    MOEBIUS_CUDA(cudaMemAdvise(begin, range.num_bytes, cudaMemAdviseSetPreferredLocation, here));
    MOEBIUS_CUDA(cudaMemPrefetchAsync(begin, range.num_bytes, here, 0, cudaStreamPerThread));
    MOEBIUS_CUDA(cudaMemsetAsync(begin, 0, range.num_bytes, cudaStreamPerThread));
  }
  MOEBIUS_CUDA(cudaStreamSynchronize(cudaStreamPerThread));
  return owned.release();
}

}  // namespace moebius::cuda
