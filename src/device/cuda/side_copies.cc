#include "device/side_copies.h"

#include "device/accelerator.h"
#include "device/cuda/cuda.h"

namespace moebius::cuda {
namespace {

// A stream for one direction, and an event for the end of the last copies of each slot.
class Direction {
 public:
  Direction() {
    MOEBIUS_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    for (cudaEvent_t* event : {&forked_, &ended_[0], &ended_[1]})
      MOEBIUS_CUDA(cudaEventCreateWithFlags(event, cudaEventDisableTiming));
  }
  ~Direction() {
    for (cudaEvent_t event : {forked_, ended_[0], ended_[1]}) cudaEventDestroy(event);
    cudaStreamDestroy(stream_);
  }
  Direction(const Direction&) = delete;

  cudaStream_t stream() const { return stream_; }
  void begin_after(const Stream& s) {
    MOEBIUS_CUDA(cudaEventRecord(forked_, cuda_stream(s)));
    MOEBIUS_CUDA(cudaStreamWaitEvent(stream_, forked_, 0));
  }
  void copy(void* to, const void* from, int64_t num_bytes, cudaMemcpyKind kind) {
    MOEBIUS_CUDA(cudaMemcpyAsync(to, from, num_bytes, kind, stream_));
  }
  void end(int slot) {
    MOEBIUS_CUDA(cudaEventRecord(ended_[slot], stream_));
    is_open_[slot] = true;
  }
  // Each event is waited for once. Later work stays ordered after it, and a later capture must not wait for an event
  // from outside.
  void wait(cudaStream_t waiting, int slot, bool closes) {
    if (is_open_[slot]) MOEBIUS_CUDA(cudaStreamWaitEvent(waiting, ended_[slot], 0));
    if (closes) is_open_[slot] = false;
  }

 private:
  cudaStream_t stream_ = nullptr;
  cudaEvent_t forked_ = nullptr, ended_[SideCopies::kSlots] = {};
  bool is_open_[SideCopies::kSlots] = {};  // whether there are copies that the device's stream has not waited for
};

class GpuCopies final : public SideCopies {
 public:
  void to_host(Stream& s, int slot, std::span<const Copy> copies) override {
    leaving_.begin_after(s);
    for (const Copy& c : copies) leaving_.copy(c.host, c.device, c.num_bytes, cudaMemcpyDeviceToHost);
    leaving_.end(slot);
  }
  void to_device(Stream& s, int slot, std::span<const Copy> copies) override {
    arriving_.begin_after(s);
    leaving_.wait(arriving_.stream(), slot, /*closes=*/false);
    for (const Copy& c : copies) arriving_.copy(c.device, c.host, c.num_bytes, cudaMemcpyHostToDevice);
    arriving_.end(slot);
  }
  void wait_to_host(Stream& s, int slot) override { leaving_.wait(cuda_stream(s), slot, /*closes=*/true); }
  void wait_to_device(Stream& s, int slot) override { arriving_.wait(cuda_stream(s), slot, /*closes=*/true); }

 private:
  Direction leaving_, arriving_;
};

}  // namespace

std::unique_ptr<SideCopies> make_side_copies(Accelerator&) { return std::make_unique<GpuCopies>(); }

}  // namespace moebius::cuda
