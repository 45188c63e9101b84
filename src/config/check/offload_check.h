// Checks the keys of activations and weights that are kept on the host.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} if memory.offload names tensors that no layer keeps or that cannot be offloaded, or if
// memory.offload_fraction would do nothing.
void check_offload(const RunSpec& s);

// Throws Error{usage} if memory.offload names "weights" on a layout whose ranks keep copies of weights, or with weights
// that cannot be offloaded.
void check_offload_weights(const RunSpec& s, int64_t world_size);

}  // namespace moebius
