// The derivative w.r.t. the logits of everything that depends on them: weights, balance losses and z-loss. The formulas
// are in cpu/route_bwd.cc.
#include <cfloat>

#include "device/cuda/cuda.h"
#include "ops/routing/cuda/scores.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cuda {
namespace {

struct Backward {
  float* dlogits_TE;
  const float *dweight_TK, *dsbar_SE, *logits_TE;
  const int32_t *segment_T, *topk_TK, *pair_row_TK;
  RouteRule rule;
  ScoreFunction score;  // of the weights
  const double* total_tokens_1;
  double z_coeff;
  int num_tokens, num_experts, top_k;
};

// The chosen pairs of a token, pair k in lane k % 32: expert, unscaled weight, gradient.
template <int M>
struct Pairs {
  int expert[M];
  float weight[M], g[M];
};

// row holds the scores of the token.
template <int M>
__device__ Pairs<M> load_pairs(const Backward& a, int64_t t, int lane, const float* row) {
  const bool of_chosen = a.rule.normalize && a.score == ScoreFunction::softmax;
  const float* logits = a.logits_TE + t * a.num_experts;
  Pairs<M> pairs;
  float max = -INFINITY;
#pragma unroll
  for (int r = 0; r < M; ++r) {
    const int k = r * kWarpSize + lane;
    pairs.expert[r] = -1;
    pairs.weight[r] = of_chosen ? -INFINITY : 0.0f;
    pairs.g[r] = 0;
    if (k < a.top_k) {
      const int64_t p = t * a.top_k + k;
      pairs.expert[r] = a.topk_TK[p];
      pairs.weight[r] = of_chosen ? logits[pairs.expert[r]] : row[pairs.expert[r]];
      if (a.pair_row_TK[p] >= 0) pairs.g[r] = a.dweight_TK[p];
    }
    max = fmaxf(max, pairs.weight[r]);
  }
  if (!a.rule.normalize) return pairs;
  if (of_chosen) max = warp_max(max);
  float sum = 0;
#pragma unroll
  for (int r = 0; r < M; ++r) {
    if (of_chosen) pairs.weight[r] = pairs.expert[r] >= 0 ? exp_f32(pairs.weight[r] - max) : 0.0f;
    sum += pairs.weight[r];
  }
  sum = warp_sum(sum);
  if (!of_chosen) sum += 1e-20f;
#pragma unroll
  for (int r = 0; r < M; ++r) pairs.weight[r] /= sum;
  return pairs;
}

// Computes d, the gradient through the weights. A row in shared memory moves values from the lanes of pairs to
// those of experts.
template <int M, int N>
__device__ void weight_gradient(const Backward& a, int64_t t, int lane, const float (&s)[N], float* row,
                                float (&d)[N]) {
#pragma unroll
  for (int r = 0; r < N; ++r) row[r * kWarpSize + lane] = s[r];
  __syncwarp();
  const Pairs<M> pairs = load_pairs<M>(a, t, lane, row);
  float mean = 0;
#pragma unroll
  for (int r = 0; r < M; ++r) mean += pairs.g[r] * pairs.weight[r];
  mean = warp_sum(mean);
  const float everywhere = sums_to_one(a.score) && !a.rule.normalize ? a.rule.scale * mean : 0.0f;
  const float inner = a.rule.normalize ? mean : 0.0f;
  float slope[M];
#pragma unroll
  for (int r = 0; r < M; ++r) slope[r] = pairs.expert[r] >= 0 ? log_slope(a.score, row[pairs.expert[r]]) : 1.0f;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < N; ++r) row[r * kWarpSize + lane] = everywhere != 0.0f ? -everywhere * s[r] : 0.0f;
  __syncwarp();
#pragma unroll
  for (int r = 0; r < M; ++r) {
    if (pairs.expert[r] >= 0) row[pairs.expert[r]] += a.rule.scale * pairs.weight[r] * slope[r] * (pairs.g[r] - inner);
  }
  __syncwarp();
#pragma unroll
  for (int r = 0; r < N; ++r) d[r] = row[r * kWarpSize + lane];
}

// sbar = s (softmax) or s / max(sum of s, FLT_MIN) (sigmoid); below FLT_MIN the denominator is a constant.
template <int N>
__device__ void add_balance_gradient(const Backward& a, int64_t t, int lane, const RowScores& sums, const float (&s)[N],
                                     float (&d)[N]) {
  const int64_t segment = a.segment_T == nullptr ? 0 : a.segment_T[t];
  const bool divided = !sums_to_one(a.rule.score);  // by their sum
  const float total = !divided ? 1.0f : sums.sum < FLT_MIN ? FLT_MIN : sums.sum;
  float dsbar[N], mean = 0;
  load_row(a.dsbar_SE + segment * a.num_experts, a.num_experts, lane, 0.0f, dsbar);
#pragma unroll
  for (int r = 0; r < N; ++r) mean += s[r] / total * dsbar[r];
  mean = divided && sums.sum < FLT_MIN ? 0.0f : warp_sum(mean);
#pragma unroll
  for (int r = 0; r < N; ++r) d[r] += s[r] / total * log_slope(a.rule.score, s[r]) * (dsbar[r] - mean);
}

// A warp owns a token; shared memory: a row for each warp.
template <int N, int M>
__global__ void __launch_bounds__(N > 8 ? 128 : 256) route_bwd_kernel(Backward a) {
  constexpr int kWarps = (N > 8 ? 128 : 256) / kWarpSize;
  __shared__ float rows[kWarps][N * kWarpSize];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize, E = a.num_experts;
  const int64_t t = static_cast<int64_t>(blockIdx.x) * kWarps + warp;
  if (t >= a.num_tokens) return;
  float logits[N], s[N], d[N];
  load_row(a.logits_TE + t * E, E, lane, -INFINITY, logits);
  RowScores sums = score_row(a.score, logits, E, lane, s);
  ScoreFunction scored = a.score;
  weight_gradient<M>(a, t, lane, s, rows[warp], d);
  if (a.dsbar_SE != nullptr) {
    if (scored != a.rule.score) sums = score_row(a.rule.score, logits, E, lane, s);
    scored = a.rule.score;
    add_balance_gradient(a, t, lane, sums, s, d);
  }
  if (a.z_coeff != 0) {
    const float z_scale = static_cast<float>(a.z_coeff / *a.total_tokens_1);
    if (scored != ScoreFunction::softmax) sums = score_row(ScoreFunction::softmax, logits, E, lane, s);
    const float slope = 2.0f * z_scale * (sums.max + logf(sums.sum));
#pragma unroll
    for (int r = 0; r < N; ++r) d[r] += slope * s[r];
  }
#pragma unroll
  for (int r = 0; r < N; ++r) {
    const int i = r * kWarpSize + lane;
    if (i < E) a.dlogits_TE[t * E + i] = d[r];
  }
}

}  // namespace

void route_bwd(Stream& s, const RouteBwd& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const Backward args{.dlogits_TE = a.dlogits_TE.ptr<float>(),
                      .dweight_TK = a.dweight_TK.ptr<float>(),
                      .dsbar_SE = a.dsbar_SE.empty() ? nullptr : a.dsbar_SE.ptr<float>(),
                      .logits_TE = a.logits_TE.ptr<float>(),
                      .segment_T = a.segment_T.empty() ? nullptr : a.segment_T.ptr<int32_t>(),
                      .topk_TK = a.route.topk_TK.ptr<int32_t>(),
                      .pair_row_TK = a.route.pair_row_TK.ptr<int32_t>(),
                      .rule = a.rule,
                      .score = weight_score(a.rule, K),
                      .total_tokens_1 = a.z_coeff == 0 ? nullptr : a.total_tokens_1.ptr<double>(),
                      .z_coeff = a.z_coeff,
                      .num_tokens = static_cast<int>(T),
                      .num_experts = static_cast<int>(E),
                      .top_k = static_cast<int>(K)};
  with_row_registers(E, K, [&]<int N, int M>() {
    constexpr int kThreads = N > 8 ? 128 : 256;
    route_bwd_kernel<N, M>
        <<<static_cast<unsigned>(div_ceil(T, kThreads / kWarpSize)), kThreads, 0, cuda_stream(s)>>>(args);
    check_launch("route_bwd");
  });
}

}  // namespace moebius::cuda
