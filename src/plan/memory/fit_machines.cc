#include "plan/memory/fit_machines.h"

#include <algorithm>
#include <cmath>

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

FitMachines common_machines(const std::vector<FitMachines>& all) {
  FitMachines common = all.at(0);
  for (const FitMachines& m : all) {
    common.gpus.hopper |= m.gpus.hopper;
    common.gpus.others |= m.gpus.others;
    if (m.rank_host_bytes == 0) continue;
    common.rank_host_bytes =
        common.rank_host_bytes == 0 ? m.rank_host_bytes : std::min(common.rank_host_bytes, m.rank_host_bytes);
  }
  return common;
}

}  // namespace moebius
