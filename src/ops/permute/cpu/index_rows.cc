// index_rows is a counting sort, stable in tokens: blocks of tokens count, one pass over the counts
// gives each block its first row in each expert, and the blocks then place their pairs at once.
#include <algorithm>

#include "ops/permute/index_rows.h"
#include "ops/permute/index_rows_blocks.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cpu {
namespace {

// Calls fn(local expert, pair) for the pairs of a block that have a row on this rank; the others get row -1.
template <class F>
void for_each_pair(const IndexRows& a, int64_t block, F&& fn) {
  const int64_t T = a.topk_TK.dim(0), K = a.topk_TK.dim(1), e = a.offsets_e1.numel() - 1;
  const int32_t* topk = a.topk_TK.ptr<int32_t>();
  const int32_t* kept = a.kept_TK.empty() ? nullptr : a.kept_TK.ptr<int32_t>();
  const int64_t begin = block * kTokensPerIndexBlock * K, end = std::min(T, (block + 1) * kTokensPerIndexBlock) * K;
  for (int64_t p = begin; p < end; ++p) {
    const int64_t expert = topk[p] - a.first_expert;
    if (expert >= 0 && expert < e && !(kept && kept[p] < 0)) fn(expert, p);
  }
}

// Replaces the counts of blocks by their first rows.
void start_blocks(const IndexRows& a, int32_t* start_Be, int64_t blocks) {
  const int64_t e = a.offsets_e1.numel() - 1;
  int32_t* offsets = a.offsets_e1.ptr<int32_t>();
  int32_t row = 0;
  for (int64_t i = 0; i < e; ++i) {
    offsets[i] = row;
    for (int64_t b = 0; b < blocks; ++b) {
      const int32_t count = start_Be[b * e + i];
      start_Be[b * e + i] = row;
      row += count;
    }
    if (!a.counts_e.empty()) a.counts_e.ptr<int32_t>()[i] = row - offsets[i];
  }
  offsets[e] = row;
}

void place_block(const IndexRows& a, int64_t block, int32_t* next_e) {
  const int64_t T = a.topk_TK.dim(0), K = a.topk_TK.dim(1);
  const int64_t begin = block * kTokensPerIndexBlock * K, end = std::min(T, (block + 1) * kTokensPerIndexBlock) * K;
  int32_t* pair_row = a.pair_row_TK.ptr<int32_t>();
  int64_t done = begin;  // pair_row can share memory with the old one: an element is written after it was read
  for_each_pair(a, block, [&](int64_t expert, int64_t p) {
    const int32_t row = next_e[expert]++;
    a.row_token_R.ptr<int32_t>()[row] = static_cast<int32_t>(p / K);
    if (!a.row_pair_R.empty()) a.row_pair_R.ptr<int32_t>()[row] = static_cast<int32_t>(p);
    std::fill(pair_row + done, pair_row + p, -1);
    pair_row[p] = row;
    done = p + 1;
  });
  std::fill(pair_row + done, pair_row + end, -1);
}

}  // namespace

void index_rows(Stream& s, const IndexRows& a) {
  const int64_t e = a.offsets_e1.numel() - 1, blocks = div_ceil(a.topk_TK.dim(0), kTokensPerIndexBlock);
  auto* start_Be = static_cast<int32_t*>(a.scratch.data);
  s.pool().run(blocks, [&](int64_t block, int) {
    int32_t* count_e = start_Be + block * e;
    std::fill_n(count_e, e, 0);
    for_each_pair(a, block, [&](int64_t expert, int64_t) { ++count_e[expert]; });
  });
  start_blocks(a, start_Be, blocks);
  s.pool().run(blocks, [&](int64_t block, int) { place_block(a, block, start_Be + block * e); });
}

void index_arrivals(Stream&, const IndexArrivals& a) {
  const int64_t W = a.counts_WE.dim(0), E = a.counts_WE.dim(1), e = a.offsets_e1.numel() - 1;
  const int32_t* counts = a.counts_WE.ptr<int32_t>() + a.first_expert;
  int32_t *offsets = a.offsets_e1.ptr<int32_t>(), *arrival = a.arrival_R.ptr<int32_t>(), *row = a.row_R.ptr<int32_t>();
  std::fill_n(offsets, e + 1, 0);
  for (int64_t i = 0; i < e; ++i) {
    offsets[i + 1] = offsets[i];
    for (int64_t q = 0; q < W; ++q) offsets[i + 1] += counts[q * E + i];
  }
  MOEBIUS_ASSERT(offsets[e] <= a.arrival_R.numel());
  // Arrivals in their order; offsets[i] is the place of the next row of expert i,
  // and at the end the first row of expert i + 1.
  int32_t at = 0;
  for (int64_t q = 0; q < W; ++q) {
    for (int64_t i = 0; i < e; ++i) {
      for (int32_t n = 0; n < counts[q * E + i]; ++n, ++at) {
        arrival[offsets[i]] = at;
        row[at] = offsets[i]++;
      }
    }
  }
  std::copy_backward(offsets, offsets + e, offsets + e + 1);
  offsets[0] = 0;
}

}  // namespace moebius::cpu
