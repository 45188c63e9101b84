#include "device/gpus_found.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

namespace moebius {
namespace {

constexpr int kHopper = 90;

int capability_of(const GpuFound& gpu) { return 10 * gpu.capability_major + gpu.capability_minor; }

bool has_kernels_for(const GpusFound& found, const GpuFound& gpu) {
  const int capability = capability_of(gpu);
  return found.lowest_capability == kHopper ? capability == kHopper : capability >= found.lowest_capability;
}

std::string capability_text(int capability) { return fmt::format("{}.{}", capability / 10, capability % 10); }

// Returns the native code that a GPU runs; 0: none, so that it needs PTX.
int native_code_for(const GpusFound& found, const GpuFound& gpu) {
  int best = 0;
  for (const int native : found.native) {
    const bool runs = native / 10 == gpu.capability_major && native <= capability_of(gpu);
    if (runs && (native != kHopper || capability_of(gpu) == kHopper)) best = std::max(best, native);
  }
  return best;
}

// Returns how to build native code for a GPU in addition to the architectures of this build; empty if
// cmake/cuda.cmake has none for it.
std::string how_to_build_for(const GpusFound& found, const GpuFound& gpu) {
  const int wanted = 10 * gpu.capability_major;
  if (wanted != 80 && wanted != 100 && wanted != 120) return "";
  std::set<int> native(found.native.begin(), found.native.end());
  native.insert(wanted);
  std::string list;
  for (const int n : native) list += fmt::format("{}{}{}", list.empty() ? "" : ";", n, n == kHopper ? "a" : "");
  return fmt::format(", or build with -DMOEBIUS_CUDA_ARCHITECTURES=\"{}\"", list);
}

// Only a driver that is as new as the compiler knows its PTX.
std::string why_no_ptx(const GpusFound& found, int index) {
  const GpuFound& gpu = found.visible[index];
  if (native_code_for(found, gpu) != 0 || found.driver >= found.built_with) return "";
  return fmt::format(
      "GPU {} is {} (compute capability {}), for which this build has no native code, and the driver for CUDA {} is too "
      "old for its PTX; update the driver to one for CUDA {} or later{}",
      index, gpu.name, capability_text(capability_of(gpu)), cuda_version_text(found.driver),
      cuda_version_text(found.built_with), how_to_build_for(found, gpu));
}

std::string capabilities_text(const GpusFound& found) {
  if (found.lowest_capability == kHopper)
    return "9.0 (Hopper) only; -DMOEBIUS_CUDA_ARCHITECTURES=\"80;90a\" builds them for 8.0 and later";
  return capability_text(found.lowest_capability) + " and later";
}

// Any driver of the same major version is enough.
std::string needed_text(const GpusFound& found) { return fmt::format("{}.0 or later", found.built_with / 1000); }

// Returns the GPUs with enough shared memory that this program has kernels for, as CUDA_VISIBLE_DEVICES lists them.
std::string usable_uuids(const GpusFound& found) {
  std::string list;
  for (const GpuFound& gpu : found.visible)
    if (has_kernels_for(found, gpu) && gpu.shared_bytes_per_block >= kMinSharedBytes)
      list += (list.empty() ? "" : ",") + gpu.uuid;
  return list;
}

std::string why_no_kernels(const GpusFound& found, int index) {
  const GpuFound& gpu = found.visible[index];
  const std::string usable = usable_uuids(found);
  const std::string advice =
      usable.empty()
          ? fmt::format("they run on none of the visible GPUs ({}), but CUDA_VISIBLE_DEVICES may hide others",
                        found.visible.size())
          : fmt::format("set CUDA_VISIBLE_DEVICES={}, on which they run", usable);
  return fmt::format("GPU {} is {} (compute capability {}.{}), and this build has kernels for {}; {}", index, gpu.name,
                     gpu.capability_major, gpu.capability_minor, capabilities_text(found), advice);
}

// No GPU is known that has the compute capability and not the memory.
std::string why_no_shared_memory(const GpusFound& found, int index) {
  const GpuFound& gpu = found.visible[index];
  if (gpu.shared_bytes_per_block >= kMinSharedBytes) return "";
  const std::string usable = usable_uuids(found);
  return fmt::format(
      "GPU {} is {} (compute capability {}), where a block may have {} bytes of shared memory, and the kernels need {}; {}",
      index, gpu.name, capability_text(capability_of(gpu)), gpu.shared_bytes_per_block, kMinSharedBytes,
      usable.empty() ? fmt::format("none of the visible GPUs ({}) has them, but CUDA_VISIBLE_DEVICES may hide others",
                                   found.visible.size())
                     : fmt::format("set CUDA_VISIBLE_DEVICES={}, which have them", usable));
}

const char* kernels_of(const GpuFound& gpu, KernelChoice choice) {
  if (choice == KernelChoice::portable) return "portable kernels only, without cuDNN's attention";
  return capability_of(gpu) == kHopper
             ? "Hopper's own kernels where the shape allows them, else portable ones, and cuDNN's attention where it is "
               "faster"
             : "portable kernels, and cuDNN's attention where this build and the shape allow it";
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
  if (!has_kernels_for(found, found.visible[index])) return why_no_kernels(found, index);
  const std::string why = why_no_shared_memory(found, index);
  return why.empty() ? why_no_ptx(found, index) : why;
}

std::string why_not_loaded(const GpusFound& found, int index, const std::string& error) {
  const GpuFound& gpu = found.visible[index];
  const std::string name =
      fmt::format("GPU {} is {} (compute capability {})", index, gpu.name, capability_text(capability_of(gpu)));
  const std::string build = how_to_build_for(found, gpu);
  if (error == "cudaErrorNoKernelImageForDevice")
    return fmt::format("{}, for which this build has no kernels that load; build again from clean sources{}", name,
                       build);
  if (error == "cudaErrorInvalidPtx" || error == "cudaErrorUnsupportedPtxVersion") {
    const std::string built = cuda_version_text(found.built_with);
    return fmt::format("{}, and the driver for CUDA {} does not compile this build's PTX of CUDA {}; {}{}", name,
                       cuda_version_text(found.driver), built,
                       found.driver < found.built_with
                           ? fmt::format("update the driver to one for CUDA {} or later", built)
                           : "it should, so install it again, or build again from clean sources",
                       build);
  }
  if (error == "cudaErrorJitCompilerNotFound")
    return fmt::format(
        "{}, and the driver's compiler of PTX (libnvidia-ptxjitcompiler) is missing; install the whole driver (a "
        "container gets it with NVIDIA_DRIVER_CAPABILITIES=compute,utility){}",
        name, build);
  if (error == "cudaErrorJitCompilationDisabled")
    return fmt::format("{}, for which PTX must be compiled, and that is disabled; unset CUDA_DISABLE_PTX_JIT{}", name,
                       build);
  return "";
}

std::vector<int> distinct_gpus(const GpusFound& found) {
  std::vector<int> first;
  std::set<std::pair<std::string, int>> seen;
  for (int i = 0; i < static_cast<int>(found.visible.size()); ++i)
    if (seen.emplace(found.visible[i].name, capability_of(found.visible[i])).second) first.push_back(i);
  return first;
}

GpuKinds gpu_kinds(const GpusFound& found, int64_t num_ranks) {
  if (found.visible.empty()) return {};
  GpuKinds kinds{.hopper = false};
  const int64_t used = std::min<int64_t>(std::max<int64_t>(1, num_ranks), std::ssize(found.visible));
  for (int64_t i = 0; i < used; ++i)
    (capability_of(found.visible[static_cast<size_t>(i)]) == kHopper ? kinds.hopper : kinds.others) = true;
  return kinds;
}

GpuKinds gpu_kinds(DeviceKind device, int64_t num_ranks) {
  return device == DeviceKind::cuda ? gpu_kinds(gpus_found(), num_ranks) : GpuKinds{};
}

bool compiles_ptx(const GpusFound& found) {
  return std::any_of(found.visible.begin(), found.visible.end(),
                     [&](const GpuFound& gpu) { return native_code_for(found, gpu) == 0; });
}

std::string kernels_text(const GpusFound& found, int index, KernelChoice choice) {
  const GpuFound& gpu = found.visible[index];
  const int native = native_code_for(found, gpu);
  const std::string code = native != 0 ? "native code for " + capability_text(native)
                                       : fmt::format("PTX of {}, which the driver compiles when a program first runs",
                                                     capability_text(found.lowest_capability));
  const std::string name = fmt::format("{} (compute capability {})", gpu.name, capability_text(capability_of(gpu)));
  return fmt::format("{}: {}; {}", name, kernels_of(gpu, choice), code);
}

std::string cuda_versions_text(const GpusFound& found) {
  if (found.built_with == 0) return "not part of this build";
  const std::string built = "built with " + cuda_version_text(found.built_with);
  if (found.driver == 0) return built + ", no driver";
  return fmt::format("{}, driver for {}{}", built, cuda_version_text(found.driver),
                     driver_is_too_old(found) ? ": too old" : "");
}

}  // namespace moebius
