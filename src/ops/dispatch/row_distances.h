// Selects rows by the distance between the ranks of their token and of their expert, for ops that move only some of
// the rows. The functions are constexpr, so that kernels can call them too.
#pragma once

#include <cstdint>
#include <limits>

namespace moebius {

// The distance from rank s to rank q among W ranks: (q - s) mod W.
constexpr int64_t rank_distance(int64_t s, int64_t q, int64_t W) { return q >= s ? q - s : q - s + W; }

// The rows whose distance is in [first, end). The distance of a row is that from the rank of its token to the rank of
// its expert. A rank's own rows have distance 0.
struct RowDistances {
  int64_t first = 0, end = std::numeric_limits<int32_t>::max();  // an end above W stands for W

  constexpr bool has(int64_t distance) const { return distance >= first && distance < end; }
  constexpr int64_t end_among(int64_t W) const { return end < W ? end : W; }
  // Returns the number of these distances among W ranks.
  constexpr int64_t count(int64_t W) const { return end_among(W) > first ? end_among(W) - first : 0; }
};
inline constexpr RowDistances kOwnRows{.first = 0, .end = 1};

// The ranks that send rows at some distances: first, first + 1, ..., last, where rank 0 follows rank W - 1.
struct SourceRanks {
  int64_t first, last;
  constexpr bool wraps() const { return first > last; }
};

// Returns the ranks that send rows at the distances `of` to `rank`. REQUIRES: of.count(W) > 0
constexpr SourceRanks source_ranks(const RowDistances& of, int64_t rank, int64_t W) {
  return {rank_distance(of.end_among(W) - 1, rank, W), rank_distance(of.first, rank, W)};
}

}  // namespace moebius
