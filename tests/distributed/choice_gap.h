// Measures how near a router's choices are to a tie. Where two scores differ by less than the noise
// of rounding, that noise decides.
// From there on, layouts that are equal up to rounding diverge.
#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <vector>

#include "engine/engine.h"
#include "ops/routing/routing_ref.h"

namespace moebius {

// Returns the distance between the least of the k greatest values and the greatest other value. It
// is infinite when there are no others.
inline double gap_below_best(ref::Values values, int64_t k) {
  if (k >= std::ssize(values)) return std::numeric_limits<double>::infinity();
  std::sort(values.begin(), values.end(), std::greater<>());
  return values[k - 1] - values[k];
}

// Returns the gap of one token's choice: the choice of groups, and of experts in the chosen groups.
// A group counts as its best expert.
inline double choice_gap(const ref::Values& value, const ModelSpec& m) {
  const int64_t width = m.num_experts / m.n_group;
  const RouteRule rule{.num_groups = m.n_group, .topk_groups = m.topk_group, .group_score = GroupScore::max};
  ref::Values group;
  for (auto at = value.begin(); at != value.end(); at += width) group.push_back(*std::max_element(at, at + width));
  return std::min(gap_below_best(group, m.topk_group), gap_below_best(ref::mask_groups(value, rule, m.top_k), m.top_k));
}

// Returns the values by which Sinkhorn orders the experts of each token, as shares that sum to
// one; [T, E].
inline ref::Values balanced_scores(const ref::Values& logits, int64_t T, int64_t E) {
  ref::Values value = ref::sinkhorn(logits, T, E);
  for (auto row = value.begin(); row != value.end(); row += E) {
    const double sum = std::accumulate(row, row + E, 0.0);
    for (auto at = row; at != row + E; ++at) *at /= sum;
  }
  return value;
}

// Returns the smallest gap of the choices in the last forward pass of a layer. Where balance losses
// count the k best plain scores, their gap is included.
// bias: null where there is none.
inline double choice_gap(const Model::MoeLayer& layer, const EngineSpec& spec, const float* bias) {
  const ModelSpec& m = spec.model;
  const Tensor logits_TE = layer.saved->router.logits_TE;
  const int64_t T = logits_TE.dim(0), E = m.num_experts;
  const ref::Values logits(logits_TE.ptr<float>(), logits_TE.ptr<float>() + T * E);
  const ref::Values balanced = spec.balance.sinkhorn ? balanced_scores(logits, T, E) : ref::Values{};
  double gap = std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t < T; ++t) {
    ref::Values value = ref::scores(m.score, &logits[t * E], E);
    if (spec.balance.aux_coeff != 0) gap = std::min(gap, gap_below_best(value, m.top_k));
    for (int64_t i = 0; bias && i < E; ++i) value[i] += bias[i];
    if (spec.balance.sinkhorn) value.assign(balanced.begin() + t * E, balanced.begin() + (t + 1) * E);
    gap = std::min(gap, choice_gap(value, m));
  }
  return gap;
}

// Returns the smallest gap between weights of kept and dropped pairs of an expert in the last
// forward pass of a layer, when the lightest pairs are dropped.
inline double drop_gap(const Model::MoeLayer& layer, const EngineSpec& spec) {
  const Router::Saved& saved = layer.saved->router;
  const int64_t T = saved.logits_TE.dim(0), E = spec.model.num_experts, K = spec.model.top_k;
  const float* logits = saved.logits_TE.ptr<float>();
  const int32_t* topk = saved.route.topk_TK.ptr<int32_t>();
  const std::vector<int64_t> chosen(topk, topk + T * K);
  const RouteRule rule{.normalize = spec.model.norm_topk_prob};
  const ref::Values weight = ref::weigh(rule, ref::Values(logits, logits + T * E), chosen, T, E, K);
  std::vector<ref::Values> of_expert(E);
  for (int64_t p = 0; p < T * K; ++p) of_expert[chosen[p]].push_back(weight[p]);
  const auto capacity = static_cast<int64_t>(std::ceil(static_cast<double>(T * K) / E * spec.balance.capacity_factor));
  double gap = std::numeric_limits<double>::infinity();
  for (const ref::Values& weights : of_expert) gap = std::min(gap, gap_below_best(weights, capacity));
  return gap;
}

}  // namespace moebius
