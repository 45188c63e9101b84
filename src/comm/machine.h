// The ranks of a machine, which they detect by its name.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/control.h"

namespace moebius {

// Returns a name that is equal on the ranks of one machine, and differs between machines
// while they run.
std::string machine_name();

// Returns the ranks on this rank's machine, itself among them, in rank order. All ranks call it together.
std::vector<int> ranks_of_machine(Control& control);
// Returns the sum of a number over some of the ranks. All ranks call it together; each names the ranks that it adds.
int64_t sum_of_ranks(Control& control, const std::vector<int>& ranks, int64_t mine);

}  // namespace moebius
