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
  on_machine_ = ranks_of_machine(control_);
  const auto here = std::find(on_machine_.begin(), on_machine_.end(), control_.rank());
  index_ = static_cast<int>(here - on_machine_.begin()) % Accelerator::count();
  const std::vector<std::string> gpus = control_.gather(gpu_identity(index_));
  for (int r = 0; r < control_.size(); ++r)
    if (gpus[r] == gpus[control_.rank()]) sharing_.push_back(r);
  const std::vector<std::string> processes = control_.gather(std::to_string(::getpid()));  // by rank
  std::set<std::string> distinct;
  for (const int r : sharing_) distinct.insert(processes[r]);
  num_processes_ = static_cast<int>(distinct.size());
  each_has_its_own_ = std::set(gpus.begin(), gpus.end()).size() == gpus.size();
}

int64_t GpuRanks::sum_of_sharing(int64_t mine) { return sum_of_ranks(control_, sharing_, mine); }

int64_t GpuRanks::sum_of_machine(int64_t mine) { return sum_of_ranks(control_, on_machine_, mine); }

}  // namespace moebius
