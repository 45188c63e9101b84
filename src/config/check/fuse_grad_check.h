// Checks what optimizer.fuse_grad needs.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Error{usage} where a run on GPUs has optimizer.fuse_grad, and run.kernels = "portable" leaves its kernels out, or they do
// not take the widths of this model.
void check_fuse_grad(const RunSpec& s);

}  // namespace moebius
