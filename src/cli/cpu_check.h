// Checks whether this CPU has the features that the program was compiled for.
#pragma once

#include <string>
#include <vector>

namespace moebius {

struct BuiltForFeature {
  const char* name;
  bool needed;   // the compiler may have used it
  bool present;  // this CPU has it
};

// Returns every instruction set that the compiler can use and detect in a CPU.
std::vector<BuiltForFeature> built_for_features();

// Returns the names of features that are needed and not present, separated by commas; empty if the
// program can run.
std::string missing_cpu_features(const std::vector<BuiltForFeature>& features);

}  // namespace moebius
