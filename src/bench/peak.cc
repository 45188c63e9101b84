#include "bench/peak.h"

#include <utility>

namespace moebius {

// The figures are half of those in the data sheets, which count the zeros of sparse operands.
// The first entry that the name contains decides.
double datasheet_tflops(const std::string& gpu) {
  constexpr std::pair<const char*, double> kSheets[] = {{"H100 PCIe", 756.5}, {"H800 PCIe", 756.5}, {"H100 NVL", 835.5},
                                                        {"H200 NVL", 835.5},  {"GH200", 989.4},     {"H200", 989.4},
                                                        {"H100", 989.4},      {"H800", 989.4},      {"H20", 148.0}};
  for (const auto& [name, tflops] : kSheets) {
    if (gpu.find(name) != std::string::npos) return tflops;
  }
  return 0;
}

}  // namespace moebius
