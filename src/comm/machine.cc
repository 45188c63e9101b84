#include "comm/machine.h"

#include <unistd.h>

#include <fstream>

namespace moebius {

std::string machine_name() {
  char host[256] = {};
  ::gethostname(host, sizeof host - 1);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return host + ("/" + boot);
}

std::vector<int> ranks_of_machine(Control& control) {
  const std::vector<std::string> machines = control.gather(machine_name());
  std::vector<int> ranks;
  for (int r = 0; r < control.size(); ++r)
    if (machines[r] == machines[control.rank()]) ranks.push_back(r);
  return ranks;
}

int64_t sum_of_ranks(Control& control, const std::vector<int>& ranks, int64_t mine) {
  const std::vector<std::string> all = control.gather(std::to_string(mine));
  int64_t sum = 0;
  for (const int r : ranks) sum += std::stoll(all[r]);
  return sum;
}

}  // namespace moebius
