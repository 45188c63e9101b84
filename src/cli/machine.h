// The properties of the machine and of the build that results depend on.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

struct Machine {
  std::string cpu;                    // model name
  int cpus = 0;                       // CPUs that this process may use
  std::vector<std::string> features;  // the features of cpu_features() that the CPU has
  int64_t memory_bytes = 0;
};

struct CpuFeature {
  const char* name;  // as in /proc/cpuinfo
  const char* use;   // what is slower without it
};
const std::vector<CpuFeature>& cpu_features();

Machine this_machine();
// Returns the first line of every benchmark, such as "AMD EPYC 9454 (2 CPUs, avx2 avx512f avx512_bf16), 23.5 GiB".
std::string machine_line(const Machine& machine);

}  // namespace moebius
