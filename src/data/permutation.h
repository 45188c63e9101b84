// A random permutation without a table: the image of an index is computed on demand.
#pragma once

#include <cstdint>

#include "core/rng.h"

namespace moebius {

// Returns the image of `index` under a permutation of [0, size) that the key of `rng` selects. It
// takes O(1) time and memory.
// The permutation is a balanced Feistel network over the next power of four, applied until the
// result is inside the range (Black and Rogaway, 2002).
// REQUIRES: 0 <= index < size.
int64_t permuted(int64_t index, int64_t size, const Rng& rng);

}  // namespace moebius
