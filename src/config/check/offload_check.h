// Checks the keys of activations that are kept on the host.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} where memory.offload names what no layer keeps or what cannot be moved, or where
// memory.offload_fraction would do nothing.
void check_offload(const RunSpec& s);

}  // namespace moebius
