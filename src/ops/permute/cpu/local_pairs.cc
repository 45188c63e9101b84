#include "ops/permute/local_pairs.h"

#include <algorithm>

#include "ops/permute/permute_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTokensPerTask = 1024;

}  // namespace

void local_pairs(Stream& s, const LocalPairs& a) {
  const int64_t K = a.topk_NK.dim(1), L = a.topk_NL.dim(1);
  parallel_rows(s.pool(), a.topk_NK.dim(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) {
      const int32_t* from = a.topk_NK.ptr<int32_t>() + n * K;
      const int32_t* kept = a.kept_NK.empty() ? nullptr : a.kept_NK.ptr<int32_t>() + n * K;
      int32_t *topk = a.topk_NL.ptr<int32_t>() + n * L, *of_pair = a.k_NL.ptr<int32_t>() + n * L;
      float* weight = a.weight_NL.ptr<float>() + n * L;
      std::fill_n(topk, L, -1);
      std::fill_n(of_pair, L, -1);
      std::fill_n(weight, L, 0.0f);
      for (int64_t k = 0, l = 0; k < K; ++k) {
        if (from[k] < a.first_expert || from[k] >= a.first_expert + a.num_experts || (kept && kept[k] < 0)) continue;
        topk[l] = from[k];
        of_pair[l] = static_cast<int32_t>(k);
        weight[l++] = a.weight_NK.ptr<float>()[n * K + k];
      }
    }
  });
}

void local_pairs_to_rows(Stream& s, const LocalPairsToRows& a) {
  const int32_t* row = a.pair_row_NL.ptr<int32_t>();
  parallel_rows(s.pool(), a.from_NL.numel(), kTokensPerTask, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      if (row[i] >= 0) a.to_R.ptr<float>()[row[i]] = a.from_NL.ptr<float>()[i];
  });
}

void rows_to_all_pairs(Stream& s, const RowsToAllPairs& a) {
  const int64_t K = a.to_NK.dim(1), L = a.pair_row_NL.dim(1);
  parallel_rows(s.pool(), a.to_NK.dim(0), kTokensPerTask, [&](int64_t begin, int64_t end) {
    std::fill(a.to_NK.ptr<float>() + begin * K, a.to_NK.ptr<float>() + end * K, 0.0f);
    for (int64_t i = begin * L; i < end * L; ++i) {
      const int32_t row = a.pair_row_NL.ptr<int32_t>()[i];
      if (row >= 0) a.to_NK.ptr<float>()[i / L * K + a.k_NL.ptr<int32_t>()[i]] = a.from_R.ptr<float>()[row];
    }
  });
}

}  // namespace moebius::cpu
