// A counting sort of the pairs by expert, stable in tokens: blocks of tokens count, one pass over
// the counts gives each block its first row in each expert, and the blocks then place their pairs
// at once.
#include <algorithm>

#include "ops/routing/cpu/routing.h"

namespace moebius::cpu {

void start_experts(const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1);
  int32_t* counts = a.route.counts_E.ptr<int32_t>();
  int32_t* offsets = a.route.offsets_E1.ptr<int32_t>();
  std::fill_n(counts, E, 0);
  for (int64_t b = 0; b < num_blocks(T); ++b) {
    int32_t* start = scratch.start_BE + b * E;
    for (int64_t i = 0; i < E; ++i) {
      const int32_t count = start[i];
      start[i] = counts[i];
      counts[i] += count;
    }
  }
  offsets[0] = 0;
  for (int64_t i = 0; i < E; ++i) offsets[i + 1] = offsets[i] + counts[i];
  for (int64_t b = 0; b < num_blocks(T); ++b) {
    for (int64_t i = 0; i < E; ++i) scratch.start_BE[b * E + i] += offsets[i];
  }
}

void index_rows(Stream& s, const RouteFwd& a, const RouteScratch& scratch) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const bool may_drop = a.rule.capacity > 0;
  const int32_t* topk = a.route.topk_TK.ptr<int32_t>();
  int32_t* row_token = a.route.row_token_R.ptr<int32_t>();
  int32_t* row_pair = a.route.row_pair_R.ptr<int32_t>();
  int32_t* pair_row = a.route.pair_row_TK.ptr<int32_t>();
  s.pool().run(num_blocks(T), [&](int64_t block, int) {
    int32_t* next = scratch.start_BE + block * E;
    const int64_t begin = block * kTokensPerBlock, end = std::min(T, begin + kTokensPerBlock);
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t p = t * K; p < (t + 1) * K; ++p) {
        if (may_drop && pair_row[p] < 0) continue;
        const int32_t row = next[topk[p]]++;
        row_token[row] = static_cast<int32_t>(t);
        row_pair[row] = static_cast<int32_t>(p);
        pair_row[p] = row;
      }
    }
  });
}

}  // namespace moebius::cpu
