// The definitions of index_rows.h as plain loops.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moebius::ref {

struct RowIndex {
  std::vector<int64_t> offsets, token, pair, row_of_pair;
};

// kept empty: every pair is.
inline RowIndex index_rows(const std::vector<int64_t>& topk, const std::vector<int64_t>& kept, int64_t K, int64_t first,
                           int64_t e) {
  RowIndex index{.offsets = {0}, .row_of_pair = std::vector<int64_t>(topk.size(), -1)};
  for (int64_t expert = first; expert < first + e; ++expert) {
    for (std::size_t p = 0; p < topk.size(); ++p) {
      if (topk[p] != expert || (!kept.empty() && kept[p] < 0)) continue;
      index.row_of_pair[p] = static_cast<int64_t>(index.token.size());
      index.token.push_back(static_cast<int64_t>(p) / K);
      index.pair.push_back(static_cast<int64_t>(p));
    }
    index.offsets.push_back(static_cast<int64_t>(index.token.size()));
  }
  return index;
}

// counts[q][i]: rows from rank q for the i-th expert here.
inline RowIndex index_arrivals(const std::vector<std::vector<int64_t>>& counts) {
  std::vector<int64_t> topk;  // of the arrivals
  for (const auto& of_rank : counts) {
    for (size_t i = 0; i < of_rank.size(); ++i) topk.insert(topk.end(), of_rank[i], static_cast<int64_t>(i));
  }
  return index_rows(topk, {}, 1, 0, static_cast<int64_t>(counts[0].size()));
}

}  // namespace moebius::ref
