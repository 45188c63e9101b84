#include "device/gpu_mark.h"

#include "device/cuda/cuda.h"

namespace moebius {

void GpuMark::set(Accelerator& accelerator) {
  if (!event_) {
    cudaEvent_t event = nullptr;
    MOEBIUS_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    event_ = std::shared_ptr<void>(event, [](void* e) { cudaEventDestroy(static_cast<cudaEvent_t>(e)); });
  }
  MOEBIUS_CUDA(
      cudaEventRecord(static_cast<cudaEvent_t>(event_.get()), static_cast<cudaStream_t>(accelerator.native_stream())));
}

void GpuMark::wait() const { MOEBIUS_CUDA(cudaEventSynchronize(static_cast<cudaEvent_t>(event_.get()))); }

}  // namespace moebius
