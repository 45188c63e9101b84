// The definitions of dispatch.h as plain loops, for all ranks at once.
#pragma once

#include <cstdint>
#include <set>
#include <vector>

namespace moebius::ref {

// For each token of a rank, the experts of its pairs that are not dropped.
using TokenExperts = std::vector<std::vector<int64_t>>;

// A row of a token, and the rank that it came from.
struct Arrival {
  int64_t from = 0, token = 0;
  bool operator==(const Arrival&) const = default;
};

// Returns the rows that arrive at rank q, in their order. experts_of_rank: E/P.
inline std::vector<Arrival> arrivals(const std::vector<TokenExperts>& ranks, int64_t q, int64_t etp,
                                     int64_t experts_of_rank) {
  std::vector<Arrival> all;
  for (int64_t from = 0; from < static_cast<int64_t>(ranks.size()); ++from) {
    for (int64_t t = 0; t < static_cast<int64_t>(ranks[from].size()); ++t) {
      bool comes = false;
      for (const int64_t expert : ranks[from][t]) comes |= expert / experts_of_rank == q / etp;
      if (comes) all.push_back({from, t});
    }
  }
  return all;
}

// Returns the rows that return to rank q, in their order: the rank that returns each, and the token of q that it
// is for.
inline std::vector<Arrival> returns(const std::vector<TokenExperts>& ranks, int64_t q, int64_t etp,
                                    int64_t experts_of_rank) {
  std::vector<Arrival> all;
  for (int64_t from = 0; from < static_cast<int64_t>(ranks.size()); ++from) {
    for (const Arrival& row : arrivals(ranks, from, etp, experts_of_rank))
      if (row.from == q) all.push_back({from, row.token});
  }
  return all;
}

// Returns the ep ranks that have experts of a token, ascending.
inline std::set<int64_t> destinations(const std::vector<int64_t>& experts, int64_t experts_of_rank) {
  std::set<int64_t> all;
  for (const int64_t expert : experts) all.insert(expert / experts_of_rank);
  return all;
}

}  // namespace moebius::ref
