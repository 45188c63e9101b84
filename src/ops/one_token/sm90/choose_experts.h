// The choice of a token's experts inside of the kernels that read their weights: each block makes it, with the code of
// route_fwd, so that no kernel waits for one that does nothing else.
#pragma once

#include <type_traits>

#include "ops/one_token/one_token.h"
#include "ops/routing/cuda/choose_row.h"

namespace moebius::cuda::sm90 {

constexpr int kMaxTokenExperts = 256, kMaxTokenChoices = 16;

// The shared memory of a warp that chooses.
struct ChoiceRow {
  float value_E[kMaxTokenExperts];
  int32_t chosen_K[kMaxTokenChoices];
};

// The same of a warp that also computes their weights.
struct WeighedRow : ChoiceRow {
  float logits_E[kMaxTokenExperts], weight_K[kMaxTokenChoices];
};

// One warp chooses. kExperts: 32 times the experts of a lane. Row: WeighedRow for the weights too. The logits are read
// past L1, which may hold those of an earlier layer while kernels overlap; layers may share their memory.
template <int kExperts, class Row>
__device__ __forceinline__ void choose_experts(Choose a, Row& shared) {
  constexpr int N = kExperts / kWarpSize;
  const int lane = static_cast<int>(threadIdx.x % kWarpSize);
  const ChooseRow row{shared.value_E, shared.chosen_K};
  float logits[N], s[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    logits[r] = i < a.num_experts ? __ldcg(a.logits_TE + i) : -INFINITY;
  }
  score_row(a.score, logits, a.num_experts, lane, s);
  choose_row(a, row, 0, lane, s);
  if constexpr (std::is_same_v<Row, WeighedRow>) {
#pragma unroll
    for (int r = 0; r < N; ++r) shared.logits_E[r * kWarpSize + lane] = logits[r];
    __syncwarp();
    a.logits_TE = shared.logits_E;
    a.weight_TK = shared.weight_K;
    weigh_row<1>(a, row, 0, lane, s);
  }
  __syncwarp();
}

// Calls fn<kExperts>() with the least that holds so many experts.
template <class F>
void with_experts(int64_t num_experts, F&& fn) {
  if (num_experts <= 128) return fn.template operator()<128>();
  fn.template operator()<kMaxTokenExperts>();
}

inline Choose choice_of(const TokenExperts& a) {
  return {.topk_TK = a.topk_1K.ptr<int32_t>(),
          .weight_TK = a.weight_1K.ptr<float>(),
          .start_BE = nullptr,
          .logits_TE = a.logits_1E.ptr<float>(),
          .bias_E = a.bias_E.empty() ? nullptr : a.bias_E.ptr<float>(),
          .cost_TE = nullptr,
          .column_scale_E = nullptr,
          .rule = a.rule,
          .score = weight_score(a.rule, a.topk_1K.dim(1)),
          .num_tokens = 1,
          .num_experts = static_cast<int>(a.logits_1E.dim(1)),
          .top_k = static_cast<int>(a.topk_1K.dim(1))};
}

}  // namespace moebius::cuda::sm90
