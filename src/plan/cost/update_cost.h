// The bytes that an update of the optimizer reads and writes, for each element that a rank owns.
#pragma once

#include "config/train_spec.h"

namespace moebius {

// Returns the bytes in device memory: gradient, master and moments are read; all but the gradient, and a bf16 weight, are
// written; and the sum of squares reads the gradient once more.
double update_bytes(const OptimizerSpec& optimizer);
// Returns the bytes that an update reads from the host's memory. It writes as many to it.
double host_update_bytes(const OptimizerSpec& optimizer);

// Muon reads and writes these bytes beyond update_bytes(), for an element of a matrix: u is cleared, two steps of SGD add momentum to it,
// and it is copied (parallel/optim/muon.cc).
constexpr double kMomentumBytes = 44;
// The owner of a quantised element moves these bytes: the master is read for the magnitudes of blocks and again for the element,
// which is written in place of a bf16 weight (parallel/sharding/bucket_exchange.cc).
constexpr double kQuantiseBytes = 4 + 4 + 1 - 2;
// Each gradient that the first micro-batch does not store is cleared.
constexpr double kClearBytes = 4;

}  // namespace moebius
