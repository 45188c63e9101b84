// The definitions of routing.h as plain loops in double.
#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <vector>

#include "ops/routing/routing.h"

namespace moebius::ref {

using Values = std::vector<double>;

inline Values scores(ScoreFunction score, const double* logits, int64_t E) {
  Values s(logits, logits + E);
  const double max = *std::max_element(s.begin(), s.end());
  double sum = 0;
  switch (score) {
    case ScoreFunction::softmax:
      for (double& x : s) sum += x = std::exp(x - max);
      for (double& x : s) x /= sum;
      break;
    case ScoreFunction::sigmoid:
      for (double& x : s) x = 1 / (1 + std::exp(-x));
      break;
  }
  return s;
}

inline double logsumexp(const double* logits, int64_t E) {
  const double max = *std::max_element(logits, logits + E);
  double sum = 0;
  for (int64_t i = 0; i < E; ++i) sum += std::exp(logits[i] - max);
  return max + std::log(sum);
}

// Probabilities of the balance losses.
inline Values sbar(ScoreFunction score, const double* logits, int64_t E) {
  Values s = scores(score, logits, E);
  const double sum = std::max<double>(std::accumulate(s.begin(), s.end(), 0.0), FLT_MIN);
  for (double& x : s) x /= sum;
  return s;
}

// Positions by descending value, the lower first among equals.
inline std::vector<int64_t> order(const Values& value) {
  std::vector<int64_t> position(value.size());
  std::iota(position.begin(), position.end(), 0);
  std::stable_sort(position.begin(), position.end(), [&](int64_t i, int64_t j) { return value[i] > value[j]; });
  return position;
}

inline std::vector<int64_t> top(const Values& value, int64_t k) {
  std::vector<int64_t> best = order(value);
  best.resize(k);
  return best;
}

inline Values mask_groups(Values value, const RouteRule& rule, int64_t K) {
  const int64_t width = static_cast<int64_t>(value.size()) / rule.num_groups;
  int64_t count = 0;  // how many of its best experts score a group
  switch (rule.group_score) {
    case GroupScore::max:
      count = 1;
      break;
    case GroupScore::sum_of_two:
      count = 2;
      break;
    case GroupScore::sum_of_top:
      count = std::max<int64_t>(1, K / rule.topk_groups);
      break;
  }
  Values group(rule.num_groups);
  for (int64_t g = 0; g < rule.num_groups; ++g) {
    const Values part(value.begin() + g * width, value.begin() + (g + 1) * width);
    for (const int64_t i : top(part, count)) group[g] += part[i];
  }
  const std::vector<int64_t> kept = top(group, rule.topk_groups);
  for (int64_t g = 0; g < rule.num_groups; ++g) {
    if (std::find(kept.begin(), kept.end(), g) != kept.end()) continue;
    std::fill_n(value.begin() + g * width, width, -std::numeric_limits<double>::infinity());
  }
  return value;
}

// d1 cost of Sinkhorn's fixed point, [T, E].
inline Values sinkhorn(const Values& logits, int64_t T, int64_t E) {
  Values cost(logits), d0(T, 1.0), d1(E, 1.0);
  for (int64_t t = 0; t < T; ++t) {
    const double max = *std::max_element(logits.begin() + t * E, logits.begin() + (t + 1) * E);
    for (int64_t i = 0; i < E; ++i) cost[t * E + i] = std::exp(logits[t * E + i] - max);
  }
  double moved = 1;
  for (int n = 0; n < 100 && moved > 1e-4; ++n) {
    moved = 0;
    for (int64_t t = 0; t < T; ++t) {
      double sum = 1e-8;
      for (int64_t i = 0; i < E; ++i) sum += d1[i] * cost[t * E + i];
      d0[t] = 1.0 / T / sum;
    }
    for (int64_t i = 0; i < E; ++i) {
      double sum = 1e-8;
      for (int64_t t = 0; t < T; ++t) sum += d0[t] * cost[t * E + i];
      const double next = 1.0 / E / sum;
      moved += std::abs(next - d1[i]) / E;
      d1[i] = next;
    }
  }
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t i = 0; i < E; ++i) cost[t * E + i] *= d1[i];
  }
  return cost;
}

// [T, K] experts.
inline std::vector<int64_t> choose(const RouteRule& rule, const Values& logits, const Values& bias, int64_t T,
                                   int64_t E, int64_t K) {
  std::vector<int64_t> chosen;
  const Values balanced = rule.choice == RouteChoice::sinkhorn ? sinkhorn(logits, T, E) : Values{};
  for (int64_t t = 0; t < T; ++t) {
    Values value = scores(rule.score, &logits[t * E], E);
    for (size_t i = 0; i < bias.size(); ++i) value[i] += bias[i];
    if (rule.choice == RouteChoice::sinkhorn) value.assign(balanced.begin() + t * E, balanced.begin() + (t + 1) * E);
    if (rule.num_groups > 1) value = mask_groups(value, rule, K);
    std::vector<int64_t> best = top(value, K);
    for (int64_t k = 0; k < K && rule.choice == RouteChoice::forced; ++k) best[k] = (t * K + k) % E;
    chosen.insert(chosen.end(), best.begin(), best.end());
  }
  return chosen;
}

// [T, K] weights of the chosen experts, before any drop.
inline Values weigh(const RouteRule& rule, const Values& logits, const std::vector<int64_t>& chosen, int64_t T,
                    int64_t E, int64_t K) {
  ScoreFunction score = rule.score;
  if (rule.choice == RouteChoice::sinkhorn) score = K == 1 ? ScoreFunction::sigmoid : ScoreFunction::softmax;
  Values weight(T * K);
  for (int64_t t = 0; t < T; ++t) {
    const Values s = scores(score, &logits[t * E], E);
    double sum = sums_to_one(score) ? 0 : 1e-20;
    for (int64_t k = 0; k < K; ++k) sum += s[chosen[t * K + k]];
    for (int64_t k = 0; k < K; ++k) {
      weight[t * K + k] = rule.scale * s[chosen[t * K + k]] / (rule.normalize ? sum : 1.0);
    }
  }
  return weight;
}

// Pairs that find their expert full.
inline std::vector<bool> dropped(const RouteRule& rule, const std::vector<int64_t>& chosen, const Values& weight,
                                 int64_t E) {
  std::vector<bool> drop(chosen.size(), false);
  for (int64_t e = 0; e < E && rule.capacity > 0; ++e) {
    std::vector<size_t> pairs;
    for (size_t p = 0; p < chosen.size(); ++p) {
      if (chosen[p] == e) pairs.push_back(p);
    }
    if (rule.drop == RouteDrop::probs) {
      std::stable_sort(pairs.begin(), pairs.end(), [&](size_t p, size_t q) { return weight[p] > weight[q]; });
    }
    for (size_t i = rule.capacity; i < pairs.size(); ++i) drop[pairs[i]] = true;
  }
  return drop;
}

// [S, E] sums of sbar, and how often an expert is among the K best plain scores.
struct Balance {
  Values prob, count;
};
inline Balance balance(ScoreFunction score, const Values& logits, const std::vector<int32_t>& segment, int64_t S,
                       int64_t E, int64_t K) {
  Balance b{Values(S * E), Values(S * E)};
  for (size_t t = 0; t < segment.size(); ++t) {
    const Values p = sbar(score, &logits[t * E], E);
    for (int64_t i = 0; i < E; ++i) b.prob[segment[t] * E + i] += p[i];
    for (const int64_t i : top(scores(score, &logits[t * E], E), K)) b.count[segment[t] * E + i] += 1;
  }
  return b;
}

inline double balance_loss(const Balance& b, double coeff, int64_t S, int64_t E, int64_t K, double total) {
  double loss = 0;
  for (int64_t s = 0; s < S; ++s) {
    double tokens = 0, product = 0;
    for (int64_t i = 0; i < E; ++i) {
      tokens += b.count[s * E + i] / K;
      product += b.prob[s * E + i] * b.count[s * E + i];
    }
    if (tokens > 0) loss += coeff * tokens / total * E / (K * tokens * tokens) * product;
  }
  return loss;
}

}  // namespace moebius::ref
