// How near a router's choices are to a tie. Where two scores differ by less than the noise of rounding, that noise says
// who is chosen, and layouts that compute the same to rounding go different ways from there.
#pragma once

#include <algorithm>
#include <functional>
#include <limits>
#include <vector>

#include "model/model.h"
#include "ops/routing/routing_ref.h"

namespace moebius {

// Between the least of the k greatest values and the greatest of the others; infinite when there are no others.
inline double gap_below_best(ref::Values values, int64_t k) {
  if (k >= std::ssize(values)) return std::numeric_limits<double>::infinity();
  std::sort(values.begin(), values.end(), std::greater<>());
  return values[k - 1] - values[k];
}

// Of the choice of a token: of the groups that are kept, and of the experts in them. A group is its best expert.
inline double choice_gap(const ref::Values& value, const ModelSpec& m) {
  const int64_t width = m.num_experts / m.n_group;
  const RouteRule rule{.num_groups = m.n_group, .topk_groups = m.topk_group, .group_score = RouteGroupScore::max};
  ref::Values group;
  for (auto at = value.begin(); at != value.end(); at += width) group.push_back(*std::max_element(at, at + width));
  return std::min(gap_below_best(group, m.topk_group), gap_below_best(ref::mask_groups(value, rule, m.top_k), m.top_k));
}

// The smallest gap of what the last forward pass of a layer chose: of the choices by score and bias, and of the k best
// plain scores, which the balance losses count. bias: null where there is none.
inline double choice_gap(const Model::MoeLayer& layer, const ModelSpec& m, const float* bias) {
  const Tensor logits_TE = layer.saved->router.logits_TE;
  const RouteScore score = m.score == ScoreFunction::softmax ? RouteScore::softmax : RouteScore::sigmoid;
  double gap = std::numeric_limits<double>::infinity();
  for (int64_t t = 0; t < logits_TE.dim(0); ++t) {
    const float* row = logits_TE.ptr<float>() + t * m.num_experts;
    const ref::Values logits(row, row + m.num_experts);
    ref::Values value = ref::scores(score, logits.data(), m.num_experts);
    gap = std::min(gap, gap_below_best(value, m.top_k));
    for (int64_t i = 0; bias && i < m.num_experts; ++i) value[i] += bias[i];
    gap = std::min(gap, choice_gap(value, m));
  }
  return gap;
}

}  // namespace moebius
