// Which ranks run on the same machine.
#pragma once

#include <string>

namespace moebius {

// Equal on the ranks of one machine, and as long as it runs, only there.
std::string machine_name();

}  // namespace moebius
