// How a weight gradient of one dense product of FP8 operands is cut over K (sm90/expert_wgrad_f8.cu).
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/tensor.h"

namespace moebius {

// A cluster of two blocks computes a tile of 256 x 256 of dw. The tiles that do not fill a round of clusters may be cut
// into parts of K. Each part is a product of its own, whose result is stored in scratch in f32. Then the parts of a
// tile are added in order, and their sum is stored in dw or added to it.
struct WgradParts {
  static constexpr int64_t kTile = 256, kDepth = 128, kBytes = 4 * kTile * kTile;  // kDepth: of a K step
  static constexpr int64_t kMaxParts = 128;

  int64_t whole = 0;  // tiles that are not cut, which come first
  int64_t cut = 0;    // tiles that are cut
  int64_t parts = 1;  // of each tile that is cut; 1: cut is 0
  int64_t in_all() const { return cut * parts; }
  int64_t scratch_bytes() const { return in_all() * kBytes; }  // at most kMaxParts * kBytes, 32 MiB
};

// Returns the cut that takes the fewest K steps, where it saves a twentieth of them; a function of the shape alone. So
// no bit depends on the number of multiprocessors, nor on a limit on blocks. dw is [M, N], of sums over K.
inline WgradParts wgrad_parts(int64_t M, int64_t N, int64_t K) {
  constexpr int64_t kClusters = 66;     // of an H100 or H200
  constexpr int64_t kResults = 4;       // K steps that the results of a tile take
  constexpr int64_t kAdding = 4;        // and a kernel that adds parts, without their number
  constexpr int64_t kPartsOfAStep = 8;  // parts that it adds in the time of a K step
  constexpr int64_t kMinDepth = 8;      // K steps of a part
  const int64_t tiles = div_ceil(M, WgradParts::kTile) * div_ceil(N, WgradParts::kTile),
                steps = div_ceil(K, WgradParts::kDepth), left = tiles % kClusters;
  if (left == 0) return {.whole = tiles};
  const int64_t uncut = div_ceil(tiles, kClusters) * (steps + kResults), rounds = tiles / kClusters;
  int64_t fewest = uncut - div_ceil(uncut, int64_t{20}), parts = 1;
  for (int64_t n = 2; n * left <= WgradParts::kMaxParts && steps >= n * kMinDepth; ++n) {
    const int64_t taken = rounds * (steps + kResults) +
                          div_ceil(n * left, kClusters) * (div_ceil(steps, n) + kResults) + kAdding +
                          div_ceil(n * left, kPartsOfAStep);
    if (taken > fewest) continue;
    fewest = taken - 1;  // of equal ones the first
    parts = n;
  }
  if (parts == 1) return {.whole = tiles};
  return {.whole = tiles - left, .cut = left, .parts = parts};
}

}  // namespace moebius
