#include "plan/memory/fit_machines.h"

#include <algorithm>
#include <cmath>

#include "core/error.h"
#include "device/device.h"
#include "plan/cost/usual_machine.h"

namespace moebius {

FitMachines fit_machine(DeviceKind device, int64_t ranks) {
  FitMachines m{.gpus = gpu_kinds(device, ranks)};
  const auto gpus = static_cast<int64_t>(gpus_found().visible.size());
  if (gpus == 0) return m;
  constexpr double kGiB = 1073741824.0, kStep = 16 * kGiB;
  const auto sharing = static_cast<double>(std::max(gpus, std::min(ranks, kRanksOfAHost)));
  m.rank_host_bytes =
      std::max(kGiB, kStep * std::floor(static_cast<double>(available_memory_bytes()) / sharing / kStep));
  return m;
}

int64_t ranks_of_gpu(int64_t ranks, int64_t gpus) { return div_ceil(ranks, gpus); }

std::optional<int64_t> gpu_bytes_here(int64_t ranks) {
  const int64_t gpus = Accelerator::count();
  std::optional<int64_t> least;
  for (int i = 0; i < std::min(ranks, gpus); ++i) {
    const int64_t bytes = gpu_bytes_of_rank(Accelerator::describe(i), ranks_of_gpu(ranks, gpus));
    least = std::min(least.value_or(bytes), bytes);
  }
  return least;
}

int64_t gpu_bytes_of_rank(const AcceleratorInfo& gpu, int64_t num_sharing) {
  constexpr int64_t kGiB = int64_t{1} << 30;
  const bool is_free = gpu.memory_bytes - gpu.free_bytes <= num_sharing * kGiB;  // but for contexts of the ranks
  return (is_free ? gpu.memory_bytes : gpu.free_bytes / kGiB * kGiB) / num_sharing;
}

FitMachines common_machines(const std::vector<FitMachines>& all) {
  FitMachines common = all.at(0);
  for (const FitMachines& m : all) {
    common.gpus.hopper |= m.gpus.hopper;
    common.gpus.others |= m.gpus.others;
    common.gpu_bytes = std::min(common.gpu_bytes, m.gpu_bytes);  // none is less than any number
    if (m.rank_host_bytes == 0) continue;
    common.rank_host_bytes =
        common.rank_host_bytes == 0 ? m.rank_host_bytes : std::min(common.rank_host_bytes, m.rank_host_bytes);
  }
  return common;
}

PlanMachine usual_machine_of(DeviceKind device, const FitMachines& machines) {
  PlanMachine machine = usual_machine(device == DeviceKind::cuda, machines.rank_host_bytes);
  if (machine.is_gpu) machine.capability = machines.gpus.hopper ? 90 : 80;
  return machine;
}

}  // namespace moebius
