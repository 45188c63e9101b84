// The properties of a GPU by which ops choose a kernel: its limits, and whether Hopper kernels may be used.
#pragma once

#include <cstdint>

#include "device/device.h"
#include "device/kernel_choice.h"

namespace moebius {

// The shared memory that a block may have on 8.6, 8.9 and 12.0: the least of all GPUs of compute capability 8.0 and
// later. Every op has kernels that need no more.
inline constexpr int64_t kMinSharedBytes = 99 << 10;

// CUDA reserves this much of a multiprocessor's shared memory for each block, on 8.0 and later.
inline constexpr int64_t kReservedSharedBytes = 1 << 10;

struct GpuLimits {
  int capability_major = 0, capability_minor = 0;
  int num_multiprocessors = 0;
  int64_t shared_bytes_per_block = 0;           // with cudaFuncAttributeMaxDynamicSharedMemorySize
  int64_t shared_bytes_per_multiprocessor = 0;  // of all its blocks, and kReservedSharedBytes of each
  bool operator==(const GpuLimits&) const = default;
  // The instructions of sm_90a exist on 9.0 alone, not on later GPUs.
  bool is_hopper() const { return capability_major == 9 && capability_minor == 0; }
  // Returns how many blocks that use this much shared memory each a multiprocessor has the memory for.
  int64_t blocks_together(int64_t shared_bytes) const {
    return shared_bytes_per_multiprocessor / (shared_bytes + kReservedSharedBytes);
  }
};

// Returns the limits of a GPU of this compute capability, as NVIDIA documents them for 8.x, 9.0, 10.x, 11.0 and 12.x.
// A later one gets the least that one of 8.0 or later has.
GpuLimits documented_gpu_limits(int capability_major, int capability_minor, int num_multiprocessors);

// Returns the limits of the GPU of s. CUDA is queried once per accelerator.
const GpuLimits& gpu_limits(const Stream& s);
// Queries the limits of the thread's current GPU. Throws Error{usage} in a build without CUDA.
GpuLimits query_gpu_limits();

// For tests: gives this accelerator these limits, so that ops choose kernels as for another GPU.
void set_gpu_limits(Accelerator& accelerator, const GpuLimits& limits);
// Sets which kernels ops may use on this accelerator; the default is automatic.
void set_kernel_choice(Accelerator& accelerator, KernelChoice choice);
// Returns whether ops may use Hopper kernels on s: it is a Hopper GPU, and the choice is automatic.
bool uses_hopper_kernels(const Stream& s);

// For tests: set_gpu_limits() for the accelerator of s, during a scope.
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
