#include "data/permutation.h"

#include <algorithm>
#include <bit>
#include <utility>

#include "core/error.h"

namespace moebius {

int64_t permuted(int64_t index, int64_t size, const Rng& rng) {
  MOEBIUS_ASSERT(0 <= index && index < size);
  constexpr int kRounds = 6;  // four make a pseudo-random permutation; two more for halves of a few bits
  const int bits = static_cast<int>(std::bit_width(static_cast<uint64_t>(size - 1)));
  const int half = std::max(1, (bits + 1) / 2);
  const uint64_t mask = (uint64_t{1} << half) - 1;
  auto x = static_cast<uint64_t>(index);
  do {  // at most four rounds on average: the domain has fewer than 4 size points
    uint64_t left = x >> half, right = x & mask;
    for (uint64_t round = 0; round < kRounds; ++round) {
      const uint64_t f = rng.bits(round << 32 | right)[0] & mask;  // a half has at most 32 bits
      left = std::exchange(right, left ^ f);
    }
    x = left << half | right;
  } while (x >= static_cast<uint64_t>(size));
  return static_cast<int64_t>(x);
}

}  // namespace moebius
