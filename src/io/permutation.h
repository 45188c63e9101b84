// A random order without a table: index -> place, computed when asked for.
#pragma once

#include <cstdint>

namespace moebius {

// A bijection of 64-bit words that spreads every input bit (the finalizer of SplitMix64, Steele, Lea and Flood 2014).
constexpr uint64_t mix64(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// The image of `index` under the permutation of [0, size) that `key` names. O(1) time and memory, the same on every
// machine. A balanced Feistel network over the next power of four, walked until it comes back inside (Black and
// Rogaway, 2002). REQUIRES: 0 <= index < size.
int64_t permuted(int64_t index, int64_t size, uint64_t key);

}  // namespace moebius
