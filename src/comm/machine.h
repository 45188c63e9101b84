// The name of a machine, which tells ranks of the same machine from others.
#pragma once

#include <string>

namespace moebius {

// Returns a name that is equal on the ranks of one machine and, while the machine runs, only there.
std::string machine_name();

}  // namespace moebius
