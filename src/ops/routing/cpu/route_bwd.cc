// The derivative w.r.t. the logits of everything that depends on them: weights, balance losses and z-loss.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "ops/routing/cpu/routing.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cpu {
namespace {

// weight_k = scale s_k, or scale s_k / S with S the sum over the chosen; dropped pairs are in S and have no gradient.
//   softmax, S: softmax over the chosen     dlogit_k = scale n_k (g_k - <g, n>)
//   softmax:                                dlogit_i = scale (s_i g_i - s_i <g, s>)
//   sigmoid, S: n = s / S                   dlogit_k = scale n_k (1 - s_k) (g_k - <g, n>)
//   sigmoid:                                dlogit_k = scale s_k (1 - s_k) g_k
// g: the derivative w.r.t. each weight, 0 for a dropped pair.
void add_weight_gradient(const RowWeights& row, const float* g, int64_t num_experts, ScoreRow& dlogits) {
  const RouteRule& rule = row.rule;
  std::array<float, kMaxExperts> weight;
  RouteRule unscaled = rule;
  unscaled.scale = 1.0f;
  weigh_row({unscaled, row.score, row.logits, row.s, row.chosen, row.top_k}, weight.data());
  float mean = 0;
  for (int64_t k = 0; k < row.top_k; ++k) mean += g[k] * weight[k];
  if (sums_to_one(row.score) && !rule.normalize) {
    for (int64_t i = 0; i < num_experts; ++i) dlogits[i] -= rule.scale * mean * row.s[i];
  }
  const float inner = rule.normalize ? mean : 0.0f;
  const int32_t* const chosen = row.chosen;
  for (int64_t k = 0; k < row.top_k; ++k) {
    const float slope = log_slope(row.score, row.s[chosen[k]]);
    dlogits[chosen[k]] += rule.scale * weight[k] * slope * (g[k] - inner);
  }
}

// sbar = s (softmax) or s / max(sum of s, FLT_MIN) (sigmoid).
void add_balance_gradient(ScoreFunction score, const RowScores& row, const ScoreRow& s, const float* dsbar,
                          int64_t num_experts, ScoreRow& dlogits) {
  const int64_t n = padded(num_experts);
  const float total = sums_to_one(score) ? 1.0f : std::max(row.sum, FLT_MIN);
  ScoreRow sbar, product;
  for (int64_t i = 0; i < num_experts; ++i) {
    sbar[i] = s[i] / total;
    product[i] = sbar[i] * dsbar[i];
  }
  std::fill(product.begin() + num_experts, product.begin() + n, 0.0f);
  // Below FLT_MIN the denominator is a constant.
  const float mean = !sums_to_one(score) && row.sum < FLT_MIN ? 0.0f : lane_sum(product, n);
  for (int64_t i = 0; i < num_experts; ++i) {
    dlogits[i] += sbar[i] * log_slope(score, s[i]) * (dsbar[i] - mean);
  }
}

void add_z_gradient(const float* logits, float z_scale, int64_t num_experts, ScoreRow& dlogits) {
  ScoreRow p;
  const RowScores row = score_row(ScoreFunction::softmax, logits, num_experts, p);
  const float slope = 2.0f * z_scale * (row.max + std::log(row.sum));
  for (int64_t i = 0; i < num_experts; ++i) dlogits[i] += slope * p[i];
}

void backward_row(const RouteBwd& a, float z_scale, int64_t t) {
  const int64_t E = a.logits_TE.dim(1), K = a.route.topk_TK.dim(1);
  const float* logits = a.logits_TE.ptr<float>() + t * E;
  ScoreRow s, dlogits;
  std::fill_n(dlogits.begin(), padded(E), 0.0f);

  std::array<float, kMaxExperts> g;
  const int32_t* row = a.route.pair_row_TK.ptr<int32_t>() + t * K;
  const float* dweight = a.dweight_TK.ptr<float>() + t * K;
  for (int64_t k = 0; k < K; ++k) g[k] = row[k] < 0 ? 0.0f : dweight[k];
  const ScoreFunction score = weight_score(a.rule, K);
  score_row(score, logits, E, s);
  add_weight_gradient({a.rule, score, logits, s, a.route.topk_TK.ptr<int32_t>() + t * K, K}, g.data(), E, dlogits);

  if (!a.dsbar_SE.empty()) {
    const int64_t segment = a.segment_T.empty() ? 0 : a.segment_T.ptr<int32_t>()[t];
    const RowScores sums = score_row(a.rule.score, logits, E, s);
    add_balance_gradient(a.rule.score, sums, s, a.dsbar_SE.ptr<float>() + segment * E, E, dlogits);
  }
  if (z_scale != 0) add_z_gradient(logits, z_scale, E, dlogits);
  std::copy_n(dlogits.begin(), E, a.dlogits_TE.ptr<float>() + t * E);
}

}  // namespace

void route_bwd(Stream& s, const RouteBwd& a) {
  const float z_scale = a.z_coeff == 0 ? 0.0f : static_cast<float>(a.z_coeff / *a.total_tokens_1.ptr<double>());
  parallel_rows(s.pool(), a.logits_TE.dim(0), kTokensPerBlock, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) backward_row(a, z_scale, t);
  });
}

}  // namespace moebius::cpu
