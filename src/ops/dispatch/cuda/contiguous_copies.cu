#include "ops/dispatch/cuda/contiguous_copies.h"

#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

// A stream for the work inside a GPU, which overlaps with the copies to other GPUs.
class Inside {
 public:
  Inside() {
    MOEBIUS_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&forked_, &joined_})
      MOEBIUS_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  ~Inside() {
    for (cudaEvent_t event : {forked_, joined_}) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }
  Inside(const Inside&) = delete;

  // Returns the stream, whose work waits for all work of s so far.
  cudaStream_t fork(const Stream& s) {
    MOEBIUS_CUDA(cudaEventRecord(forked_, cuda_stream(s)));
    MOEBIUS_CUDA(cudaStreamWaitEvent(stream_, forked_, 0));
    return stream_;
  }
  // Work of s waits for that of the stream from now on.
  void join(const Stream& s) {
    MOEBIUS_CUDA(cudaEventRecord(joined_, stream_));
    MOEBIUS_CUDA(cudaStreamWaitEvent(cuda_stream(s), joined_, 0));
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, joined_ = nullptr;
};

__global__ void add_sent_kernel(unsigned long long* sent, unsigned long long bytes) { atomicAdd(sent, bytes); }

}  // namespace

bool copy_contiguous(Stream& s, const PushRows& a) {
  auto& inside = op_state<Inside>(s);  // eager work comes first, so its stream is not created during a capture
  if (!is_capturing(s)) return false;
  const auto num_ranks = static_cast<int64_t>(a.windows.size()), num_bytes = a.x_TD.num_bytes();
  const auto copy_to = [&](int64_t rank, cudaStream_t stream) {
    std::byte* const place = a.windows[static_cast<size_t>(rank)] + a.offset + a.rank * num_bytes;
    MOEBIUS_CUDA(cudaMemcpyAsync(place, a.x_TD.data, static_cast<size_t>(num_bytes), cudaMemcpyDefault, stream));
  };
  const cudaStream_t beside = inside.fork(s);
  if (a.of.has(0)) copy_to(a.rank, beside);
  const int64_t num_others = a.of.count(num_ranks) - (a.of.has(0) ? 1 : 0);
  add_sent_kernel<<<1, 1, 0, beside>>>(reinterpret_cast<unsigned long long*>(a.sent_1.ptr<int64_t>()),
                                       static_cast<unsigned long long>(num_others * num_bytes));
  check_launch("push_rows");
  // Each rank begins with the one after it, so that they do not all write to the same GPU first.
  for (int64_t i = 1; i < num_ranks; ++i)
    if (a.of.has(i)) copy_to((a.rank + i) % num_ranks, cuda_stream(s));
  inside.join(s);
  return true;
}

}  // namespace moebius::cuda
