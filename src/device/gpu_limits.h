// The limits of a GPU, and whether its own kernels are used: what an op chooses a kernel by.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/kernel_choice.h"

namespace moebius {

struct GpuLimits {
  int capability_major = 0, capability_minor = 0;
  int num_multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // with cudaFuncAttributeMaxDynamicSharedMemorySize
  bool operator==(const GpuLimits&) const = default;
  // The instructions of sm_90a exist on 9.0 alone, not on later GPUs.
  bool is_hopper() const { return capability_major == 9 && capability_minor == 0; }
};

// The limits of the GPU of s, which CUDA is asked for once.
const GpuLimits& gpu_limits(const Stream& s);
// The limits of the current GPU. Error{usage} in a build without CUDA.
GpuLimits query_gpu_limits();

// Every op that has kernels of both kinds asks this. The accelerator keeps the choice; it is automatic
// at first.
void set_kernel_choice(Accelerator& accelerator, KernelChoice choice);
bool uses_hopper_kernels(const Stream& s);

// Tests compute as another GPU would: the accelerator of s has these limits during a scope.
class GpuLimitsScope {
 public:
  GpuLimitsScope(const Stream& s, const GpuLimits& limits);
  ~GpuLimitsScope();
  GpuLimitsScope(const GpuLimitsScope&) = delete;

 private:
  GpuLimits& limits_;
  GpuLimits before_;
};

}  // namespace moebius
