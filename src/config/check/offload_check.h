// Checks the keys of activations that are kept on the host.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} if memory.offload names tensors that no layer keeps or that cannot be offloaded, or if
// memory.offload_fraction would do nothing.
void check_offload(const RunSpec& s);

}  // namespace moebius
