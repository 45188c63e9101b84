#include "cli/machine.h"

#include <fmt/format.h>
#include <unistd.h>

#include <fstream>
#include <set>
#include <sstream>

#include "device/device.h"
#include "memory/plan.h"

namespace moebius {
namespace {

// Returns the value of the first line "key : value" of /proc/cpuinfo.
std::string cpuinfo(const std::string& key) {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with(key)) continue;
    const size_t colon = line.find(": ");
    return colon == std::string::npos ? "" : line.substr(colon + 2);
  }
  return "";
}

}  // namespace

const std::vector<CpuFeature>& cpu_features() {
  static const std::vector<CpuFeature> features{{"avx2", "every op: 8 floats at a time"},
                                                {"fma", "f32 matrix products"},
                                                {"avx512f", "16 floats at a time in every op, 8 without it"},
                                                {"avx512_bf16", "bf16 matrix products without widening to f32"},
                                                {"amx_bf16", "bf16 matrix products, several times faster again"}};
  return features;
}

Machine this_machine() {
  Machine m{.cpu = cpuinfo("model name"), .cpus = num_available_cpus()};
  if (m.cpu.empty()) m.cpu = "unknown CPU";
  std::istringstream flags(cpuinfo("flags"));
  std::set<std::string> has;
  for (std::string flag; flags >> flag;) has.insert(flag);
  for (const CpuFeature& feature : cpu_features()) {
    if (has.contains(feature.name)) m.features.push_back(feature.name);
  }
  m.memory_bytes = static_cast<int64_t>(::sysconf(_SC_PHYS_PAGES)) * ::sysconf(_SC_PAGE_SIZE);
  return m;
}

std::string machine_line(const Machine& m) {
  return fmt::format("{} ({} CPUs, {}), {}", m.cpu, m.cpus,
                     m.features.empty() ? "no vector features" : fmt::format("{}", fmt::join(m.features, " ")),
                     bytes_text(m.memory_bytes));
}

}  // namespace moebius
