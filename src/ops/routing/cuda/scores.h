// A token's scores on one warp, with the bits of cpu/scores.cc: the same polynomial, the same fused
// multiply-adds, the same order of sums. Equal logits make equal choices on both, even if
// rounding makes two scores equal. Lane l holds the scores of experts l, 32 + l, 64 + l, ...: N
// registers for up to 32 N experts.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "ops/cuda/vector.h"
#include "ops/routing/routing.h"

namespace moebius::cuda {

constexpr int kWarpSize = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Calls fn<N>() with the number of registers that a row of num_experts <= 1024 needs.
template <class F>
void with_row_registers(int64_t num_experts, F&& fn) {
  if (num_experts <= 32) return fn.template operator()<1>();
  if (num_experts <= 64) return fn.template operator()<2>();
  if (num_experts <= 128) return fn.template operator()<4>();
  if (num_experts <= 256) return fn.template operator()<8>();
  if (num_experts <= 512) return fn.template operator()<16>();
  return fn.template operator()<32>();
}

// fn<N, M>(): and M for the chosen of a token, choice k in lane k % 32. More than 32 choices are
// rare: they take M = N.
template <class F>
void with_row_registers(int64_t num_experts, int64_t top_k, F&& fn) {
  with_row_registers(num_experts, [&]<int N>() {
    if (top_k <= kWarpSize) return fn.template operator()<N, 1>();
    fn.template operator()<N, N>();
  });
}

// cpu::exp_f32.
__device__ inline float exp_f32(float x) {
  const float clamped = x < -87.3f ? -87.3f : (x > 88.3f ? 88.3f : x);
  const float shifted = __fmaf_rn(clamped, 1.44269504f, 12582912.0f);
  const float n = __fsub_rn(shifted, 12582912.0f);
  const float r = __fmaf_rn(n, 2.12194440e-4f, __fmaf_rn(-n, 0.693359375f, clamped));
  float p = 1.98412698e-4f;
  p = __fmaf_rn(p, r, 1.38888889e-3f);
  p = __fmaf_rn(p, r, 8.33333333e-3f);
  p = __fmaf_rn(p, r, 4.16666667e-2f);
  p = __fmaf_rn(p, r, 1.66666667e-1f);
  p = __fmaf_rn(p, r, 0.5f);
  p = __fmaf_rn(p, r, 1.0f);
  p = __fmaf_rn(p, r, 1.0f);
  return __fmul_rn(p, __uint_as_float((__float_as_uint(shifted) + 127u) << 23));
}

__device__ inline float sigmoid_f32(float x) { return __fdiv_rn(1.0f, __fadd_rn(1.0f, exp_f32(-x))); }

__device__ inline float warp_sum(float x) {
  for (int width = kWarpSize / 2; width > 0; width /= 2) x += __shfl_xor_sync(kAllLanes, x, width);
  return x;
}

// Returns the sum of a row in the CPU's order: 16 lanes over the row, then a tree.
template <int N>
__device__ float row_sum(const float (&v)[N]) {
  float sum = 0;
#pragma unroll
  for (int r = 0; r < N; ++r) {
    sum = __fadd_rn(sum, v[r]);
    sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, v[r], 16));
  }
#pragma unroll
  for (int width = 8; width > 0; width /= 2) sum = __fadd_rn(sum, __shfl_down_sync(kAllLanes, sum, width));
  return __shfl_sync(kAllLanes, sum, 0);
}

template <int N>
__device__ void load_row(const float* row, int num_experts, int lane, float past_end, float (&v)[N]) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    v[r] = i < num_experts ? row[i] : past_end;
  }
}

struct RowScores {
  float max, sum;  // softmax: of the logits, and of exp(logit - max); sigmoid: sum of the scores
};

// Returns the score of one expert, before the division by a sum. max: of the logits; only softmax reads it.
__device__ inline float score_of(ScoreFunction score, float logit, float max) {
  switch (score) {
    case ScoreFunction::softmax:
      return exp_f32(__fsub_rn(logit, max));
    case ScoreFunction::sigmoid:
      return sigmoid_f32(logit);
  }
  return 0;
}

// s = softmax or sigmoid of the logits, 0 past the last expert.
template <int N>
__device__ RowScores score_row(ScoreFunction score, const float (&logits)[N], int num_experts, int lane,
                               float (&s)[N]) {
  RowScores row{0, 0};
  if (score == ScoreFunction::softmax) {
    float max = logits[0];
#pragma unroll
    for (int r = 1; r < N; ++r) max = fmaxf(max, logits[r]);
    row.max = warp_max(max);
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const float x = score_of(score, logits[r], row.max);
    s[r] = r * kWarpSize + lane < num_experts ? x : 0.0f;
  }
  row.sum = row_sum(s);
  if (sums_to_one(score)) {
#pragma unroll
    for (int r = 0; r < N; ++r) s[r] = __fdiv_rn(s[r], row.sum);
  }
  return row;
}

// Returns a key with the order of floats, NaN below every number. 0 marks an expert that cannot be chosen.
__device__ inline uint32_t order_of(float x) {
  const int32_t bits = __float_as_int(__fadd_rn(x, 0.0f));  // -0 becomes 0: equal numbers, equal keys
  const uint32_t ordered = static_cast<uint32_t>(bits ^ ((bits >> 31) & 0x7fffffff)) ^ 0x80000000u;
  return x != x ? 1u : ordered;
}

// Removes the greatest key of the warp, at the lowest position among equals, and returns its position.
template <int N>
__device__ int take_best(uint32_t (&key)[N], int lane) {
  uint32_t greatest = key[0];
#pragma unroll
  for (int r = 1; r < N; ++r) greatest = max(greatest, key[r]);
  greatest = __reduce_max_sync(kAllLanes, greatest);
  unsigned position = ~0u;
#pragma unroll
  for (int r = N - 1; r >= 0; --r) position = key[r] == greatest ? r * kWarpSize + lane : position;
  position = __reduce_min_sync(kAllLanes, position);
#pragma unroll
  for (int r = 0; r < N; ++r) key[r] = position == static_cast<unsigned>(r * kWarpSize + lane) ? 0u : key[r];
  return static_cast<int>(position);
}

// Does the same, with 0 for all keys outside of [begin, end).
template <int N>
__device__ void keys_between(const uint32_t (&key)[N], int begin, int end, int lane, uint32_t (&part)[N]) {
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    part[r] = begin <= i && i < end ? key[r] : 0u;
  }
}

// Returns the score that the weights come from. Sinkhorn chooses its own.
inline ScoreFunction weight_score(const RouteRule& rule, int64_t top_k) {
  if (rule.choice != RouteChoice::sinkhorn) return rule.score;
  return top_k == 1 ? ScoreFunction::sigmoid : ScoreFunction::softmax;
}

}  // namespace moebius::cuda
