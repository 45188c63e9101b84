// The name of a machine, by which ranks detect that they are on the same machine.
#pragma once

#include <string>

namespace moebius {

// Returns a name that is equal on the ranks of one machine, and differs between machines
// while they run.
std::string machine_name();

}  // namespace moebius
