// A random order without a table: index -> place, computed when asked for.
#pragma once

#include <cstdint>

#include "core/rng.h"

namespace moebius {

// The image of `index` under the permutation of [0, size) that the key of `rng` names. O(1) time and memory.
// A balanced Feistel network over the next power of four, walked until it comes back inside (Black and Rogaway, 2002).
// REQUIRES: 0 <= index < size.
int64_t permuted(int64_t index, int64_t size, const Rng& rng);

}  // namespace moebius
