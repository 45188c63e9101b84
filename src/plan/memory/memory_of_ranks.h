// The choices about memory of a run that is about to start, made for the GPUs and hosts that its ranks have.
#pragma once

#include "comm/control.h"
#include "plan/memory/chosen_memory.h"

namespace moebius {

// Returns the choices, which are those of the first rank for the machines of all ranks: the choice depends on the
// available memory of a host, which changes while processes start. Each rank describes its own GPU alone, so that it
// makes no CUDA context on others. All ranks call it together. Throws the errors of choose_memory() on all of them.
ChosenMemory choose_memory_of_ranks(Control& control, const RunSpec& run, Transport& world);

}  // namespace moebius
