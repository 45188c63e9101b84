// The bytes that an update of the optimizer reads and writes, for each element that a rank owns.
#pragma once

#include "config/train_spec.h"

namespace moebius {

// In device memory: gradient, master and moments are read; all but the gradient, and a bf16 weight, are written; and the
// sum of squares reads the gradient once more.
double update_bytes(const OptimizerSpec& optimizer);
// What an update reads from the host's memory. It writes as many bytes to it.
double host_update_bytes(const OptimizerSpec& optimizer);

// What Muon reads and writes beyond that, for an element of a matrix: u is cleared, two steps of SGD add momentum to it,
// and it is copied (parallel/optim/muon.cc).
constexpr double kMomentumBytes = 44;
// What quantising an element costs its owner: the master is read for the magnitudes of blocks and again for the element,
// which is written in place of a bf16 weight (parallel/sharding/bucket_exchange.cc).
constexpr double kQuantiseBytes = 4 + 4 + 1 - 2;
// What clearing costs, for each gradient that the first micro-batch does not store.
constexpr double kClearBytes = 4;

}  // namespace moebius
