// The parts that tests of attention share.
#pragma once

#include "device/gpu_limits.h"

namespace moebius::testing {

// The shared memory of 8.6, 8.9 and 12.0, of 8.0, and of 9.0 and 10.0, for a block.
inline constexpr int64_t kSharedBytesOfGpus[] = {99 << 10, 163 << 10, 227 << 10};

// The portable kernels compute on the GPU of s, as on one with this shared memory, during a scope.
class PortableScope {
 public:
  explicit PortableScope(const Stream& s, int64_t shared_bytes = 227 << 10)
      : s_(s), limits_(s, {9, 0, 132, shared_bytes, shared_bytes + kReservedSharedBytes}) {
    set_kernel_choice(s_.accelerator(), KernelChoice::portable);
  }
  ~PortableScope() { set_kernel_choice(s_.accelerator(), KernelChoice::automatic); }
  PortableScope(const PortableScope&) = delete;

 private:
  const Stream& s_;
  const GpuLimitsScope limits_;
};

// Returns whether the kernels of sm_90 take heads of these widths on the GPU of s.
inline bool has_hopper_kernel(const Stream& s, DType dtype, int64_t width, int64_t v_width) {
  if (s.device() != DeviceKind::cuda || dtype != DType::bf16 || !gpu_limits(s).is_hopper()) return false;
  return width == 192 ? v_width == 128 : width == v_width && (width == 64 || width == 128);
}

}  // namespace moebius::testing
