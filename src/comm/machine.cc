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

}  // namespace moebius
