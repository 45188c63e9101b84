#include "device/gpus_found.h"

#include <fmt/format.h>

#include <algorithm>

namespace moebius {
namespace {

// The kernels are built for this capability only: wgmma and TMA are not forward compatible.
constexpr int kCapabilityMajor = 9, kCapabilityMinor = 0;

bool is_hopper(const GpuFound& gpu) {
  return gpu.capability_major == kCapabilityMajor && gpu.capability_minor == kCapabilityMinor;
}

// Any driver of the same major version is enough.
std::string needed_text(const GpusFound& found) { return fmt::format("{}.0 or later", found.built_with / 1000); }

std::string why_not_hopper(const GpusFound& found, int index) {
  const GpuFound& gpu = found.visible[index];
  const auto other = std::find_if(found.visible.begin(), found.visible.end(), is_hopper);
  const std::string advice =
      other == found.visible.end()
          ? fmt::format("none of the visible GPUs ({}) is Hopper, but CUDA_VISIBLE_DEVICES may hide others",
                        found.visible.size())
          : fmt::format("set CUDA_VISIBLE_DEVICES={}, which is Hopper", other->uuid);
  return fmt::format("GPU {} is {} (compute capability {}.{}), and the kernels are built for {}.{} (Hopper); {}", index,
                     gpu.name, gpu.capability_major, gpu.capability_minor, kCapabilityMajor, kCapabilityMinor, advice);
}

}  // namespace

std::string cuda_version_text(int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); }

bool driver_is_too_old(const GpusFound& found) {
  return found.driver > 0 && found.driver / 1000 < found.built_with / 1000;
}

std::string why_not_usable(const GpusFound& found, int index) {
  if (found.driver == 0)
    return fmt::format(
        "no NVIDIA driver is installed; install one for CUDA {} "
        "(a container has the machine's driver when it is started with GPUs)",
        needed_text(found));
  if (driver_is_too_old(found))
    return fmt::format("the NVIDIA driver is for CUDA {}, but this build needs {}; update the driver",
                       cuda_version_text(found.driver), needed_text(found));
  if (found.visible.empty())
    return fmt::format("no GPU is visible{}; unset CUDA_VISIBLE_DEVICES, or set it to a GPU that nvidia-smi -L lists",
                       found.error.empty() ? "" : fmt::format(" ({})", found.error));
  const int count = static_cast<int>(found.visible.size());
  if (index < 0 || index >= count)
    return fmt::format(
        "expected a GPU with index {}; got {} visible; set CUDA_VISIBLE_DEVICES to the GPUs to use, of those that "
        "nvidia-smi -L lists",
        index, count);
  return is_hopper(found.visible[index]) ? "" : why_not_hopper(found, index);
}

std::string cuda_versions_text(const GpusFound& found) {
  if (found.built_with == 0) return "not part of this build";
  const std::string built = "built with " + cuda_version_text(found.built_with);
  if (found.driver == 0) return built + ", no driver";
  return fmt::format("{}, driver for {}{}", built, cuda_version_text(found.driver),
                     driver_is_too_old(found) ? ": too old" : "");
}

}  // namespace moebius
