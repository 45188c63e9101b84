// The kernels that ops may use on a GPU, in a form that a plan without a GPU has too.
#pragma once

#include "device/device.h"
#include "device/kernel_choice.h"

namespace moebius {

// The default is for a plan without a GPU: Hopper GPUs.
struct GpuKernels {
  bool is_hopper = true;  // the GPU has compute capability 9.0
  KernelChoice choice = KernelChoice::automatic;
  bool are_portable() const { return choice == KernelChoice::portable; }
  bool has_hopper_kernels() const { return is_hopper && !are_portable(); }
};

// Returns the kernels that ops may use on s. REQUIRES: s is the stream of a GPU.
GpuKernels gpu_kernels(const Stream& s);

}  // namespace moebius
