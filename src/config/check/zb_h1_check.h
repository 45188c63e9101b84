// Checks parallel.schedule = "zb_h1".
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} where zb_h1 is set together with a key that it cannot be combined with. On one stage (pp = 1) it
// is 1f1b, and nothing is refused but vpp.
void check_zb_h1(const RunSpec& s);

}  // namespace moebius
