// Whether this CPU has what the program was compiled for.
#pragma once

#include <string>

namespace moebius {

// Names of the instruction sets that the program uses and this CPU lacks, comma-separated; empty when it can run.
std::string missing_cpu_features();

}  // namespace moebius
