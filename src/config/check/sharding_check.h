// Checks the keys of sharded weights and gradients.
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} where parallel.fsdp or parallel.shard_gradients is set together with a key that it cannot
// be combined with.
void check_sharding(const RunSpec& s);

}  // namespace moebius
