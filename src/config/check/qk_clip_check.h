// Checks optimizer.qk_clip.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Error{usage} where optimizer.qk_clip is set and heads cannot be clipped, or need not be.
void check_qk_clip(const RunSpec& s);

}  // namespace moebius
