// Whether this CPU has what the program was compiled for.
#pragma once

#include <string>
#include <vector>

namespace moebius {

struct BuiltForFeature {
  const char* name;
  bool needed;   // the compiler may have used it
  bool present;  // this CPU has it
};

// Every instruction set that the compiler may be told to use and can ask a CPU for.
std::vector<BuiltForFeature> built_for_features();

// Names of those needed and not present, comma-separated; empty when the program can run.
std::string missing_cpu_features(const std::vector<BuiltForFeature>& features);

}  // namespace moebius
