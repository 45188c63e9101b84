// index_rows is a counting sort, stable in tokens: blocks of tokens count, one pass over the counts
// gives each block its first row in each expert, and the blocks then place their pairs at once.
#include <algorithm>
#include <cstring>

#include "ops/permute/index_rows.h"
#include "ops/permute/index_rows_blocks.h"
#include "ops/permute/permute_backends.h"

namespace moebius::cpu {
namespace {

struct Index {
  int32_t *counts_e, *offsets_e1, *row_token_R, *row_pair_R, *pair_row_TK;  // counts_e and row_pair_R may be null
  int32_t* start_Be;
  int64_t num_tokens, top_k, first_expert, num_experts;

  int64_t begin(int64_t block) const { return block * kTokensPerIndexBlock; }  // the first token of a block
  int64_t end(int64_t block) const { return std::min(num_tokens, (block + 1) * kTokensPerIndexBlock); }
};

// Calls fn(local expert, token, pair) for the pairs of a block that have a row on this rank. experts_of(token) returns
// the experts of a token, or null for a token without pairs. kept may be null.
template <class ExpertsOf, class F>
void for_each_pair(const Index& a, int64_t block, const int32_t* kept, const ExpertsOf& experts_of, F&& fn) {
  for (int64_t t = a.begin(block); t < a.end(block); ++t) {
    const int32_t* experts = experts_of(t);
    for (int64_t k = 0; k < (experts ? a.top_k : 0); ++k) {
      const int64_t here = experts[k] - a.first_expert, pair = t * a.top_k + k;
      if (experts[k] >= 0 && here >= 0 && here < a.num_experts && !(kept && kept[pair] < 0)) fn(here, t, pair);
    }
  }
}

// Replaces the counts of blocks by their first rows.
void start_blocks(const Index& a, int64_t blocks) {
  int32_t row = 0;
  for (int64_t i = 0; i < a.num_experts; ++i) {
    a.offsets_e1[i] = row;
    for (int64_t b = 0; b < blocks; ++b) {
      int32_t& start = a.start_Be[b * a.num_experts + i];
      const int32_t count = start;
      start = row;
      row += count;
    }
    if (a.counts_e) a.counts_e[i] = row - a.offsets_e1[i];
  }
  a.offsets_e1[a.num_experts] = row;
}

template <class ExpertsOf>
void place_block(const Index& a, int64_t block, const int32_t* kept, const ExpertsOf& experts_of) {
  int32_t* next_e = a.start_Be + block * a.num_experts;
  // pair_row can share memory with kept: an element is written after it was read
  int64_t done = a.begin(block) * a.top_k;
  for_each_pair(a, block, kept, experts_of, [&](int64_t expert, int64_t token, int64_t pair) {
    const int32_t row = next_e[expert]++;
    a.row_token_R[row] = static_cast<int32_t>(token);
    if (a.row_pair_R) a.row_pair_R[row] = static_cast<int32_t>(pair);
    std::fill(a.pair_row_TK + done, a.pair_row_TK + pair, -1);
    a.pair_row_TK[pair] = row;
    done = pair + 1;
  });
  std::fill(a.pair_row_TK + done, a.pair_row_TK + a.end(block) * a.top_k, -1);
}

template <class ExpertsOf>
void index_pairs(Stream& s, const Index& a, const int32_t* kept, const ExpertsOf& experts_of) {
  const int64_t blocks = div_ceil(a.num_tokens, kTokensPerIndexBlock);
  s.pool().run(blocks, [&](int64_t block, int) {
    int32_t* count_e = a.start_Be + block * a.num_experts;
    std::fill_n(count_e, a.num_experts, 0);
    for_each_pair(a, block, kept, experts_of, [&](int64_t expert, int64_t, int64_t) { ++count_e[expert]; });
  });
  start_blocks(a, blocks);
  s.pool().run(blocks, [&](int64_t block, int) { place_block(a, block, kept, experts_of); });
}

int32_t* ints_or_null(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

}  // namespace

void index_rows(Stream& s, const IndexRows& a) {
  const int64_t K = a.topk_TK.dim(1);
  const int32_t* topk = a.topk_TK.ptr<int32_t>();
  const Index index{.counts_e = ints_or_null(a.counts_e),
                    .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                    .row_token_R = a.row_token_R.ptr<int32_t>(),
                    .row_pair_R = ints_or_null(a.row_pair_R),
                    .pair_row_TK = a.pair_row_TK.ptr<int32_t>(),
                    .start_Be = static_cast<int32_t*>(a.scratch.data),
                    .num_tokens = a.topk_TK.dim(0),
                    .top_k = K,
                    .first_expert = a.first_expert,
                    .num_experts = a.offsets_e1.numel() - 1};
  index_pairs(s, index, ints_or_null(a.kept_TK), [&](int64_t t) { return topk + t * K; });
}

void index_routes(Stream& s, const IndexRoutes& a) {
  const int64_t N = a.pair_row_NL.dim(0), L = a.pair_row_NL.dim(1), V = a.arrive_GV.dim(1);
  const int64_t rows_of_section = N / a.arrive_GV.dim(0);
  const int32_t *routes = a.routes_N2L.ptr<int32_t>(), *arrive = a.arrive_GV.ptr<int32_t>();
  float* weight = a.weight_NL.ptr<float>();
  const auto route_of = [&](int64_t n) {
    const int64_t section = n < rows_of_section ? 0 : n / rows_of_section;
    return n - section * rows_of_section < arrive[(section + 1) * V - 1] ? routes + n * 2 * L : nullptr;
  };
  parallel_rows(s.pool(), N, kTokensPerIndexBlock, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      if (const int32_t* route = route_of(n))
        std::memcpy(weight + n * L, route + L, L * sizeof(float));
      else
        std::fill_n(weight + n * L, L, 0.0f);
    }
  });
  const Index index{.counts_e = nullptr,
                    .offsets_e1 = a.offsets_e1.ptr<int32_t>(),
                    .row_token_R = a.row_token_R.ptr<int32_t>(),
                    .row_pair_R = nullptr,
                    .pair_row_TK = a.pair_row_NL.ptr<int32_t>(),
                    .start_Be = static_cast<int32_t*>(a.scratch.data),
                    .num_tokens = N,
                    .top_k = L,
                    .first_expert = a.first_expert,
                    .num_experts = a.offsets_e1.numel() - 1};
  index_pairs(s, index, nullptr, route_of);
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
