// What keeps the GPUs of a machine from being used, and what to do about it: decided from what CUDA says of them.
#pragma once

#include <string>
#include <vector>

namespace moebius {

struct GpuFound {
  std::string name, uuid;  // "NVIDIA H200"; "GPU-...", as CUDA_VISIBLE_DEVICES takes it
  int capability_major = 0, capability_minor = 0;
};

struct GpusFound {
  int built_with = 0;  // the CUDA of this program, as 1000 * major + 10 * minor; 0: none
  int driver = 0;      // the newest CUDA that the driver runs, alike; 0: there is no driver
  std::vector<GpuFound> visible;
  std::string error;  // CUDA's words where it does not count them
};

GpusFound gpus_found();  // on this machine

// A driver runs programs of its CUDA and of older ones, and newer ones of the same major version.
bool driver_is_too_old(const GpusFound& found);
// Empty when the kernels of this program run on the GPU with this index.
std::string why_not_usable(const GpusFound& found, int index);
// "built with 13.0, driver for 12.4: too old"
std::string cuda_versions_text(const GpusFound& found);
std::string cuda_version_text(int version);  // "13.0"

}  // namespace moebius
