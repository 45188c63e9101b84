// The choice of a token's experts on one warp, and their weights. route_fwd and the experts of one token share it.
#pragma once

#include "ops/routing/cuda/scores.h"

namespace moebius::cuda {

struct Choose {
  int32_t* topk_TK;
  float* weight_TK;
  int32_t* start_BE;
  const float *logits_TE, *bias_E;
  const float *cost_TE, *column_scale_E;  // sinkhorn
  RouteRule rule;
  ScoreFunction score;  // of the weights
  int num_tokens, num_experts, top_k;
};

// Shared memory of a warp: a row of values, and the chosen experts.
struct ChooseRow {
  float* value_E;
  int32_t* chosen_K;
};

// Clears the keys of all experts outside of the best groups.
template <int N>
__device__ void keep_best_groups(const Choose& a, const float* value, int lane, uint32_t (&key)[N]) {
  const RouteRule& rule = a.rule;
  const int num_groups = static_cast<int>(rule.num_groups), kept = static_cast<int>(rule.topk_groups);
  const int width = a.num_experts / num_groups, count = static_cast<int>(rule.group_top(a.top_k));
  uint32_t group[N] = {}, part[N], left[N] = {};
  const auto set_score = [&](int g, float sum) {
#pragma unroll
    for (int r = 0; r < N; ++r) group[r] = r * kWarpSize + lane == g ? order_of(sum) : group[r];
  };
  if (width == kWarpSize) {  // a group is a register
#pragma unroll
    for (int r = 0; r < N; ++r) {
      uint32_t own[1] = {key[r]};
      float sum = 0;
      for (int j = 0; j < count && r < num_groups; ++j)
        sum = __fadd_rn(sum, value[r * kWarpSize + take_best(own, lane)]);
      if (r < num_groups) set_score(r, sum);
    }
  }
  for (int g = 0; g < num_groups && width != kWarpSize; ++g) {
    keys_between(key, g * width, (g + 1) * width, lane, part);
    float sum = 0;
    for (int j = 0; j < count; ++j) sum = __fadd_rn(sum, value[take_best(part, lane)]);
    set_score(g, sum);
  }
  for (int j = 0; j < kept; ++j) {
    const int g = take_best(group, lane);
    keys_between(key, g * width, (g + 1) * width, lane, part);
#pragma unroll
    for (int r = 0; r < N; ++r) left[r] = max(left[r], part[r]);
  }
#pragma unroll
  for (int r = 0; r < N; ++r) key[r] = left[r];
}

// The K best values of the row in v, greatest first.
template <int N>
__device__ void choose_best(const Choose& a, const ChooseRow& row, int lane, const float (&v)[N]) {
  uint32_t key[N];
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    key[r] = i < a.num_experts ? order_of(v[r]) : 0u;
  }
  if (a.rule.num_groups > 1) {
#pragma unroll
    for (int r = 0; r < N; ++r) {
      const int i = r * kWarpSize + lane;
      if (i < a.num_experts) row.value_E[i] = v[r];
    }
    __syncwarp();
    keep_best_groups(a, row.value_E, lane, key);
    __syncwarp();
  }
  for (int k = 0; k < a.top_k; ++k) {
    const int expert = take_best(key, lane);
    if (lane == 0) row.chosen_K[k] = expert;
  }
  __syncwarp();
}

template <int N>
__device__ void choose_row(const Choose& a, const ChooseRow& row, int64_t t, int lane, const float (&s)[N]) {
  float v[N];
  if (a.rule.choice == RouteChoice::forced) {
    for (int k = lane; k < a.top_k; k += kWarpSize)
      row.chosen_K[k] = static_cast<int32_t>((t * a.top_k + k) % a.num_experts);
    return __syncwarp();
  }
  if (a.rule.choice == RouteChoice::sinkhorn) {
    float scale[N];
    load_row(a.cost_TE + t * a.num_experts, a.num_experts, lane, 0.0f, v);
    load_row(a.column_scale_E, a.num_experts, lane, 0.0f, scale);
#pragma unroll
    for (int r = 0; r < N; ++r) v[r] = __fmul_rn(v[r], scale[r]);
    return choose_best(a, row, lane, v);
  }
  if (a.bias_E == nullptr) return choose_best(a, row, lane, s);
  load_row(a.bias_E, a.num_experts, lane, 0.0f, v);
#pragma unroll
  for (int r = 0; r < N; ++r) v[r] = __fadd_rn(s[r], v[r]);
  choose_best(a, row, lane, v);
}

// weight[t, :] of the chosen, normalised and scaled; sums run in the order of k. s / sum of s is,
// for softmax, computed as the softmax over the chosen: no 0/0 when a bias chose experts whose
// scores vanish.
template <int M, int N>
__device__ void weigh_row(const Choose& a, const ChooseRow& row, int64_t t, int lane, const float (&s)[N]) {
  const bool of_chosen = a.rule.normalize && a.score == ScoreFunction::softmax;
  const float* logits = a.logits_TE + t * a.num_experts;
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    if (i < a.num_experts) row.value_E[i] = s[r];
  }
  __syncwarp();
  float weight[M], max = -INFINITY;
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const int k = r * kWarpSize + lane;
    weight[r] = -INFINITY;
    if (k < a.top_k) weight[r] = of_chosen ? logits[row.chosen_K[k]] : row.value_E[row.chosen_K[k]];
    max = fmaxf(max, weight[r]);
  }
  max = of_chosen ? warp_max(max) : 0.0f;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < M; ++r) {
    if (of_chosen) weight[r] = exp_f32(__fsub_rn(weight[r], max));
    const int k = r * kWarpSize + lane;
    if (k < a.top_k) row.value_E[k] = weight[r];
  }
  __syncwarp();
  float sum = 1.0f;
  if (a.rule.normalize) {
    sum = 0;
    for (int k = 0; k < a.top_k; ++k) sum = __fadd_rn(sum, row.value_E[k]);
    if (!of_chosen) sum = __fadd_rn(sum, 1e-20f);
  }
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const int k = r * kWarpSize + lane;
    if (k < a.top_k) a.weight_TK[t * a.top_k + k] = __fmul_rn(__fdiv_rn(weight[r], sum), a.rule.scale);
  }
}

}  // namespace moebius::cuda
