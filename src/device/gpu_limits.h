// The properties of a GPU by which ops choose a kernel: its limits, and whether Hopper kernels may be used.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/kernel_choice.h"

namespace moebius {

// The shared memory that a block may have on 8.6, 8.9 and 12.0: the least of all GPUs of compute capability 8.0 and
// later. Every op has kernels that need no more.
inline constexpr int64_t kMinSharedBytes = 99 << 10;

struct GpuLimits {
  int capability_major = 0, capability_minor = 0;
  int num_multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;  // with cudaFuncAttributeMaxDynamicSharedMemorySize
  bool operator==(const GpuLimits&) const = default;
  // The instructions of sm_90a exist on 9.0 alone, not on later GPUs.
  bool is_hopper() const { return capability_major == 9 && capability_minor == 0; }
};

// Returns the limits of the GPU of s. CUDA is queried once per accelerator.
const GpuLimits& gpu_limits(const Stream& s);
// Queries the limits of the thread's current GPU. Throws Error{usage} in a build without CUDA.
GpuLimits query_gpu_limits();

// Sets which kernels ops may use on this accelerator; the default is automatic.
void set_kernel_choice(Accelerator& accelerator, KernelChoice choice);
// Returns whether ops may use Hopper kernels on s: it is a Hopper GPU, and the choice is automatic.
bool uses_hopper_kernels(const Stream& s);

// For tests: gives the accelerator of s these limits during a scope, so that ops choose kernels as for another GPU.
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
