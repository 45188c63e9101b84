// Checks the keys of context parallelism, and the rows of a rank.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} with the equation that fails, and the nearest values that pass on this number of ranks.
void check_context_parallel(const RunSpec& s, int64_t ranks);
// Throws Error{usage} with the nearest lengths unless tp divides the tokens of a micro-batch on a rank.
void check_rows_of_tp(const RunSpec& s);

}  // namespace moebius
