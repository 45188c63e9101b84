// The machine that memory.recompute = "auto" plans for if none is named.
#pragma once

#include "plan/machine.h"

namespace moebius {

// Returns the figures of machines/h100.toml, which are fitted to measured runs, or those of a server's CPU. If this host
// has GPUs, a rank's share of the host's available memory is that of this host, for as many ranks as there are GPUs or, if
// they are more, for up to 8 of `ranks`.
PlanMachine usual_machine(bool is_gpu, int64_t ranks);

}  // namespace moebius
