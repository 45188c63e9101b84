// Checks optimizer.qk_clip.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} if optimizer.qk_clip is set for a model whose heads cannot be clipped, or need no clipping.
void check_qk_clip(const RunSpec& s);

}  // namespace moebius
