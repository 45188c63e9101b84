#include "comm/gpu/gpu_ranks.h"

#include <unistd.h>

#include <algorithm>
#include <set>

#include "comm/gpu/gpu_identity.h"
#include "comm/machine.h"
#include "core/error.h"
#include "device/accelerator.h"

namespace moebius {

GpuRanks::GpuRanks(Transport& world) : control_(world) {
  control_.together([] {
    const std::string why = Accelerator::why_missing();
    MOEBIUS_CHECK(usage, why.empty(), "run.device: {}; or set run.device = \"cpu\"", why);
  });
  const std::vector<std::string> machines = control_.gather(machine_name());
  const auto here = machines.begin() + control_.rank();
  for (int r = 0; r < control_.size(); ++r)
    if (machines[r] == *here) on_machine_.push_back(r);
  index_ = static_cast<int>(std::count(machines.begin(), here, *here)) % Accelerator::count();
  const std::vector<std::string> gpus = control_.gather(gpu_identity(index_));
  for (int r = 0; r < control_.size(); ++r)
    if (gpus[r] == gpus[control_.rank()]) sharing_.push_back(r);
  const std::vector<std::string> processes = control_.gather(std::to_string(::getpid()));  // by rank
  std::set<std::string> distinct;
  for (const int r : sharing_) distinct.insert(processes[r]);
  num_processes_ = static_cast<int>(distinct.size());
  each_has_its_own_ = std::set(gpus.begin(), gpus.end()).size() == gpus.size();
}

int64_t GpuRanks::sum_of_sharing(int64_t mine) { return sum_of(sharing_, mine); }

int64_t GpuRanks::sum_of_machine(int64_t mine) { return sum_of(on_machine_, mine); }

int64_t GpuRanks::sum_of(const std::vector<int>& ranks, int64_t mine) {
  const std::vector<std::string> all = control_.gather(std::to_string(mine));
  int64_t sum = 0;
  for (const int r : ranks) sum += std::stoll(all[r]);
  return sum;
}

}  // namespace moebius
