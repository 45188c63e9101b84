// Checks the settings of the optimizer that need Hopper's own kernels.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Error{usage} where a setting needs kernels that run.kernels = "portable" leaves out, or that do not take the widths
// of this model.
void check_hopper_kernels(const RunSpec& s);

}  // namespace moebius
