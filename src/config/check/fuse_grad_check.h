// Checks what optimizer.fuse_grad needs.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} if a run on GPUs sets optimizer.fuse_grad, but run.kernels = "portable" excludes its kernels, or
// they do not support the widths of this model.
void check_fuse_grad(const RunSpec& s);

}  // namespace moebius
