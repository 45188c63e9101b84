#include "device/gpu_limits.h"

#include "device/accelerator.h"
#include "device/gpu_kernels.h"

namespace moebius {
namespace {

struct ChosenKernels {
  KernelChoice choice = KernelChoice::automatic;
};

GpuLimits& kept_limits(const Stream& s) {
  GpuLimits& limits = s.accelerator().state<GpuLimits>();
  if (limits.num_multiprocessors == 0) limits = query_gpu_limits();
  return limits;
}

int64_t documented_shared_kib(int major, int minor) {
  if (major == 8) return minor == 0 || minor == 7 ? 164 : 100;
  return major >= 9 && major <= 11 ? 228 : 100;
}

}  // namespace

GpuLimits documented_gpu_limits(int capability_major, int capability_minor, int num_multiprocessors) {
  const int64_t shared = documented_shared_kib(capability_major, capability_minor) << 10;
  return {.capability_major = capability_major,
          .capability_minor = capability_minor,
          .num_multiprocessors = num_multiprocessors,
          .shared_bytes_per_block = shared - kReservedSharedBytes,  // one block may have all of it
          .shared_bytes_per_multiprocessor = shared};
}

const GpuLimits& gpu_limits(const Stream& s) { return kept_limits(s); }

void set_gpu_limits(Accelerator& accelerator, const GpuLimits& limits) { accelerator.state<GpuLimits>() = limits; }

void set_kernel_choice(Accelerator& accelerator, KernelChoice choice) {
  accelerator.state<ChosenKernels>().choice = choice;
}

GpuKernels gpu_kernels(const Stream& s) {
  return {.is_hopper = gpu_limits(s).is_hopper(), .choice = s.accelerator().state<ChosenKernels>().choice};
}

bool uses_hopper_kernels(const Stream& s) { return gpu_kernels(s).has_hopper_kernels(); }

GpuLimitsScope::GpuLimitsScope(const Stream& s, const GpuLimits& limits) : limits_(kept_limits(s)), before_(limits_) {
  limits_ = limits;
}

GpuLimitsScope::~GpuLimitsScope() { limits_ = before_; }

}  // namespace moebius
