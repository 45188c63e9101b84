#include "ops/dispatch/cuda/block_copies.h"

#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

// A stream for the copy inside a GPU, which overlaps with those to other GPUs.
class CopyInside {
 public:
  CopyInside() {
    MOEBIUS_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&forked_, &joined_})
      MOEBIUS_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  ~CopyInside() {
    for (cudaEvent_t event : {forked_, joined_}) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }
  CopyInside(const CopyInside&) = delete;

  // The copy waits for all work of s so far.
  void begin(const Stream& s, void* to, const void* from, int64_t num_bytes) {
    MOEBIUS_CUDA(cudaEventRecord(forked_, cuda_stream(s)));
    MOEBIUS_CUDA(cudaStreamWaitEvent(stream_, forked_, 0));
    MOEBIUS_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream_));
    MOEBIUS_CUDA(cudaEventRecord(joined_, stream_));
  }
  // Work of s waits for the copy from now on.
  void end(const Stream& s) { MOEBIUS_CUDA(cudaStreamWaitEvent(cuda_stream(s), joined_, 0)); }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr;
};

__global__ void add_sent_kernel(unsigned long long* sent, unsigned long long bytes) { atomicAdd(sent, bytes); }

}  // namespace

bool copy_block(Stream& s, const PushRows& a) {
  auto& inside = op_state<CopyInside>(s);  // eager work comes first, so its stream is not created during a capture
  if (!is_capturing(s)) return false;
  const auto num_ranks = static_cast<int64_t>(a.windows.size()), num_bytes = a.x_TD.num_bytes();
  const auto place = [&](int64_t rank) -> void* {
    return a.windows[static_cast<size_t>(rank)] + a.offset + a.rank * num_bytes;
  };
  if (!a.to_others) inside.begin(s, place(a.rank), a.x_TD.data, num_bytes);
  // Each rank begins with the one after it, so that no two write to the same GPU at the same time.
  for (int64_t i = 1; i < num_ranks; ++i)
    MOEBIUS_CUDA(cudaMemcpyAsync(place((a.rank + i) % num_ranks), a.x_TD.data, static_cast<size_t>(num_bytes),
                                 cudaMemcpyDefault, cuda_stream(s)));
  add_sent_kernel<<<1, 1, 0, cuda_stream(s)>>>(reinterpret_cast<unsigned long long*>(a.sent_1.ptr<int64_t>()),
                                               static_cast<unsigned long long>((num_ranks - 1) * num_bytes));
  check_launch("push_rows");
  if (!a.to_others) inside.end(s);
  return true;
}

}  // namespace moebius::cuda
