// Balance statistics, the loss that uses them, and the update of the bias for loss-free balancing.
#include <algorithm>
#include <cfloat>
#include <cmath>

#include "ops/cpu/vector.h"
#include "ops/routing/cpu/routing.h"
#include "ops/routing/routing_backends.h"

namespace moebius::cpu {
namespace {

// ln x for normal positive x: x = 2^n m with m in [sqrt(1/2), sqrt(2)), ln m = 2 atanh(u), u = (m -
// 1) / (m + 1), |u| < 0.172: the series to u^9 errs by less than 1e-9.
inline float log_f32(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const int32_t n = static_cast<int32_t>(bits - 0x3f3504f3u) >> 23;
  const float m = std::bit_cast<float>(bits - (static_cast<uint32_t>(n) << 23));
  const float u = (m - 1.0f) / (m + 1.0f), v = u * u;
  const float series = 2.0f + v * (2.0f / 3 + v * (2.0f / 5 + v * (2.0f / 7 + v * (2.0f / 9))));
  return static_cast<float>(n) * 0.693147181f + u * series;
}

// Entropy of a row of probabilities; 0 log 0 is 0.
float entropy_of(const ScoreRow& sbar, int64_t n) {
  ScoreRow term;
  for (int64_t i = 0; i < n; ++i) term[i] = sbar[i] * log_f32(std::max(sbar[i], FLT_MIN));
  return -lane_sum(term, n);
}

struct RowStats {
  double z, entropy;
};

// Returns the statistics of a row, and writes its sbar to s.
RowStats stats_of_row(const BalanceStats& a, int64_t t, ScoreRow& s, int32_t* best) {
  const int64_t E = a.logits_TE.dim(1), n = padded(E);
  const float* logits = a.logits_TE.ptr<float>() + t * E;
  RowScores sums = score_row(ScoreFunction::softmax, logits, E, s);
  const double lse = sums.max + std::log(static_cast<double>(sums.sum));
  if (a.score != ScoreFunction::softmax) sums = score_row(a.score, logits, E, s);
  best_of(s.data(), E, a.top_k, best);
  if (!sums_to_one(a.score)) {
    const float total = std::max(sums.sum, FLT_MIN);
    for (int64_t i = 0; i < n; ++i) s[i] /= total;
  }
  return {lse * lse, entropy_of(s, n)};
}

}  // namespace

// It uses one thread, so that the sums are in token order: about 30 ns for each 16 experts of a token.
void balance_stats(Stream&, const BalanceStats& a) {
  const int64_t T = a.logits_TE.dim(0), E = a.logits_TE.dim(1);
  float* prob = a.prob_SE.ptr<float>();
  float* count = a.count_SE.ptr<float>();
  std::fill_n(prob, a.prob_SE.numel(), 0.0f);
  std::fill_n(count, a.count_SE.numel(), 0.0f);
  const int32_t* segment = a.segment_T.empty() ? nullptr : a.segment_T.ptr<int32_t>();
  ScoreRow sbar;
  std::array<int32_t, kMaxExperts> best;
  RowStats sum{0, 0};
  for (int64_t t = 0; t < T; ++t) {
    const RowStats row = stats_of_row(a, t, sbar, best.data());
    sum.z += row.z;
    sum.entropy += row.entropy;
    const int64_t first = segment ? segment[t] * E : 0;
    for (int64_t i = 0; i < E; ++i) prob[first + i] += sbar[i];
    for (int64_t k = 0; k < a.top_k; ++k) count[first + best[k]] += 1.0f;
  }
  *a.z_1.ptr<double>() += sum.z;
  *a.entropy_1.ptr<double>() += sum.entropy;
}

void balance_loss(Stream&, const BalanceLoss& a) {
  const int64_t S = a.prob_SE.dim(0), E = a.prob_SE.dim(1);
  const float *prob = a.prob_SE.ptr<float>(), *count = a.count_SE.ptr<float>();
  float* dsbar = a.dsbar_SE.ptr<float>();
  const double total_tokens = *a.total_tokens_1.ptr<double>();
  for (int64_t s = 0; s < S; ++s, prob += E, count += E, dsbar += E) {
    double pairs = 0, product = 0;
    for (int64_t i = 0; i < E; ++i) {
      pairs += count[i];
      product += static_cast<double>(prob[i]) * count[i];
    }
    if (pairs == 0) continue;
    // tokens / total * E / (K tokens^2) = E / (pairs total)
    const double slope = a.coeff * static_cast<double>(E) / (pairs * total_tokens);
    *a.loss_1.ptr<double>() += slope * product;
    for (int64_t i = 0; i < E; ++i) dsbar[i] += static_cast<float>(slope * count[i]);
  }
}

void update_expert_bias(Stream&, Tensor bias_E, Tensor load_E, float rate) {
  const int64_t E = bias_E.numel();
  float* bias = bias_E.ptr<float>();
  int64_t* load = load_E.ptr<int64_t>();
  int64_t total = 0;
  for (int64_t i = 0; i < E; ++i) total += load[i];
  for (int64_t i = 0; i < E; ++i) {
    const int64_t missing = total - load[i] * E;  // E (mean - load), without rounding
    bias[i] += rate * static_cast<float>((missing > 0) - (missing < 0));
    load[i] = 0;
  }
}

}  // namespace moebius::cpu
