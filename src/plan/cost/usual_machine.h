// The machine that memory.recompute = "auto" plans for if none is named.
#pragma once

#include "plan/machine.h"

namespace moebius {

constexpr int64_t kRanksOfAHost = 8;  // on the usual machine

// Returns the figures of machines/h100.toml, which are fitted to measured runs, or those of a server's CPU.
// rank_host_bytes: the host memory of a rank; 0: that of the H100's host.
PlanMachine usual_machine(bool is_gpu, double rank_host_bytes);

}  // namespace moebius
