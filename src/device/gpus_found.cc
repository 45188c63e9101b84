#include "device/gpus_found.h"

#include <fmt/format.h>

#include <algorithm>

namespace moebius {
namespace {

constexpr int kHopper = 90;

bool has_kernels_for(const GpusFound& found, const GpuFound& gpu) {
  const int capability = 10 * gpu.capability_major + gpu.capability_minor;
  return found.lowest_capability == kHopper ? capability == kHopper : capability >= found.lowest_capability;
}

std::string capabilities_text(const GpusFound& found) {
  if (found.lowest_capability == kHopper)
    return "9.0 (Hopper) alone; -DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a\" builds them for 8.0 and later";
  return fmt::format("{}.{} and later", found.lowest_capability / 10, found.lowest_capability % 10);
}

// Any driver of the same major version is enough.
std::string needed_text(const GpusFound& found) { return fmt::format("{}.0 or later", found.built_with / 1000); }

std::string why_no_kernels(const GpusFound& found, int index) {
  const GpuFound& gpu = found.visible[index];
  const auto other = std::find_if(found.visible.begin(), found.visible.end(),
                                  [&](const GpuFound& g) { return has_kernels_for(found, g); });
  const std::string advice =
      other == found.visible.end()
          ? fmt::format("they run on none of the visible GPUs ({}), but CUDA_VISIBLE_DEVICES may hide others",
                        found.visible.size())
          : fmt::format("set CUDA_VISIBLE_DEVICES={}, on which they run", other->uuid);
  return fmt::format("GPU {} is {} (compute capability {}.{}), and this build has kernels for {}; {}", index, gpu.name,
                     gpu.capability_major, gpu.capability_minor, capabilities_text(found), advice);
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
  return has_kernels_for(found, found.visible[index]) ? "" : why_no_kernels(found, index);
}

std::string cuda_versions_text(const GpusFound& found) {
  if (found.built_with == 0) return "not part of this build";
  const std::string built = "built with " + cuda_version_text(found.built_with);
  if (found.driver == 0) return built + ", no driver";
  return fmt::format("{}, driver for {}{}", built, cuda_version_text(found.driver),
                     driver_is_too_old(found) ? ": too old" : "");
}

}  // namespace moebius
