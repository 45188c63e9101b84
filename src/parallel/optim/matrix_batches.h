// The number of matrices of one shape that Muon updates at once. More fill a GPU better, but need more scratch.
#pragma once

#include <algorithm>
#include <cstdint>

namespace moebius {

// Returns how many of `count` neighbours of `numel` elements are updated at once. 10 matrices of 2048 x 768, say, have
// 360 tiles of 128 x 128 in the smallest of their products, enough for a GPU's multiprocessors.
inline int64_t matrices_at_once(int64_t numel, int64_t count) {
  constexpr int64_t kElements = int64_t{1} << 24, kMax = 256;
  return std::clamp<int64_t>(kElements / numel, 1, std::min(count, kMax));
}

}  // namespace moebius
