// The GPUs that CUDA reports on this machine, and the reasons why some cannot be used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/gpu_limits.h"
#include "device/kernel_choice.h"

namespace moebius {

struct GpuFound {
  std::string name, uuid;  // "NVIDIA H200"; "GPU-...", as in CUDA_VISIBLE_DEVICES
  int capability_major = 0, capability_minor = 0;
  int64_t shared_bytes_per_block = kMinSharedBytes;  // as in GpuLimits
};

struct GpusFound {
  int built_with = 0;  // the CUDA of this program, as 1000 * major + 10 * minor; 0: none
  // The lowest compute capability, as 10 * major + minor, that this program has kernels for. Later GPUs run these
  // portable kernels too. Hopper kernels (90) run on Hopper alone.
  int lowest_capability = 80;
  // The capabilities that portable kernels have native code for. A GPU runs native code of an earlier capability with
  // the same major number. On other GPUs the driver compiles the PTX of lowest_capability when a program first runs.
  std::vector<int> native{80, 90};
  int driver = 0;  // the newest CUDA that the driver runs, in the same form; 0: there is no driver
  std::vector<GpuFound> visible;
  std::string error;  // CUDA's message where it could not count the GPUs
};

// The kinds of GPUs whose memory a plan counts. Their kernels need different scratch, so a plan for both kinds counts
// the larger one.
struct GpuKinds {
  bool hopper = true, others = false;
};

GpusFound gpus_found();  // queries this machine

// Returns whether the driver cannot run this program. A driver runs programs built with its own CUDA version, with an
// older one, or with a newer one of the same major version.
bool driver_is_too_old(const GpusFound& found);
// Returns why the kernels of this program cannot run on the GPU with this index; empty if they can.
std::string why_not_usable(const GpusFound& found, int index);
// Returns why the GPU with this index did not load a portable kernel, and what to do. error: the name that CUDA gave,
// such as "cudaErrorInvalidPtx". Returns an empty string for errors with another cause.
std::string why_not_loaded(const GpusFound& found, int index, const std::string& error);
// Returns whether a visible GPU has no native code. Its first run compiles PTX, which may take minutes.
bool compiles_ptx(const GpusFound& found);
// Returns the kinds of the GPUs that this many ranks of a machine use, the first of those that are visible. Without a
// visible GPU it is Hopper alone.
GpuKinds gpu_kinds(const GpusFound& found, int64_t num_ranks);
// Returns the same for the GPUs of this machine and a run on this device. A run on the CPU needs no GPU's memory, and
// has the default.
GpuKinds gpu_kinds(DeviceKind device, int64_t num_ranks);
// Returns the index of the first visible GPU of each kind, where GPUs of one name and capability are one kind.
std::vector<int> distinct_gpus(const GpusFound& found);
// Describes the kernels that a run with this choice uses on the GPU with this index, and their code.
// REQUIRES: the GPU is visible and usable.
//   "NVIDIA A100 (compute capability 8.0): portable kernels only, without cuDNN's attention; native code for 8.0"
std::string kernels_text(const GpusFound& found, int index, KernelChoice choice);
// Returns a string such as "built with 13.0, driver for 12.4: too old"
std::string cuda_versions_text(const GpusFound& found);
std::string cuda_version_text(int version);  // "13.0"

}  // namespace moebius
