// Checks the keys of context parallelism.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} with the equation that fails, and the nearest values that pass.
void check_context_parallel(const RunSpec& s);

}  // namespace moebius
