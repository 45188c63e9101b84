#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/cpu/vector.h"
#include "ops/routing/cpu/routing.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTaken = std::numeric_limits<int64_t>::min();

using KeyRow = std::array<int64_t, kMaxExperts>;

float max_of(const ScoreRow& s, int64_t n) {
  std::array<float, kLanes> lane;
  lane.fill(-std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[l] = s[i + l] > lane[l] ? s[i + l] : lane[l];
  }
  return *std::max_element(lane.begin(), lane.end());
}

// Value and position in one number: the greatest key is the best value, the lowest
// position among equals.
int64_t key_of(float value, int64_t position) {
  return (static_cast<int64_t>(order_of(value)) << 32) | static_cast<uint32_t>(~static_cast<uint32_t>(position));
}

int64_t position_of(int64_t key) { return static_cast<uint32_t>(~static_cast<uint32_t>(key)); }

void fill_keys(const float* value, int64_t n, KeyRow& key) {
  for (int64_t i = 0; i < n; ++i) key[i] = key_of(value[i], i);
  for (int64_t i = n; i < padded(n); ++i) key[i] = kTaken;
}

int64_t greatest(const int64_t* key, int64_t n) {
  int64_t best = kTaken;
  for (int64_t i = 0; i < n; ++i) best = key[i] > best ? key[i] : best;
  return best;
}

void take_best(KeyRow& key, int64_t n, int64_t k, int32_t* best) {
  for (int64_t j = 0; j < k; ++j) {
    const int64_t position = position_of(greatest(key.data(), padded(n)));
    best[j] = static_cast<int32_t>(position);
    key[position] = kTaken;
  }
}

// Returns the score of a group: the sum of its `count` best values.
float best_sum(const float* value, int64_t n, int64_t count) {
  KeyRow key;
  std::array<int32_t, kMaxExperts> best;
  fill_keys(value, n, key);
  take_best(key, n, count, best.data());
  float sum = 0;
  for (int64_t j = 0; j < count; ++j) sum += value[best[j]];
  return sum;
}

}  // namespace

float lane_sum(const ScoreRow& s, int64_t n) {
  std::array<float, kLanes> lane{};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int64_t l = 0; l < kLanes; ++l) lane[l] += s[i + l];
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t l = 0; l < width; ++l) lane[l] += lane[l + width];
  }
  return lane[0];
}

int32_t order_of(float x) {
  const int32_t bits = std::bit_cast<int32_t>(x + 0.0f);  // -0 becomes 0: equal values, equal keys
  const int32_t ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  return x != x ? std::numeric_limits<int32_t>::min() + 1 : ordered;
}

RowScores score_row(ScoreFunction score, const float* logits, int64_t num_experts, ScoreRow& s) {
  const int64_t n = padded(num_experts);
  std::copy_n(logits, num_experts, s.begin());
  std::fill(s.begin() + num_experts, s.begin() + n, -std::numeric_limits<float>::infinity());
  RowScores row{.max = 0, .sum = 0};
  switch (score) {
    case ScoreFunction::softmax:
      row.max = max_of(s, n);
      for (int64_t i = 0; i < n; ++i) s[i] = exp_f32(s[i] - row.max);
      break;
    case ScoreFunction::sigmoid:
      for (int64_t i = 0; i < n; ++i) s[i] = sigmoid_f32(s[i]);
      break;
  }
  std::fill(s.begin() + num_experts, s.begin() + n, 0.0f);
  row.sum = lane_sum(s, n);
  if (sums_to_one(score)) {
    for (int64_t i = 0; i < n; ++i) s[i] /= row.sum;
  }
  return row;
}

void best_of(const float* value, int64_t n, int64_t k, int32_t* best) {
  KeyRow key;
  fill_keys(value, n, key);
  take_best(key, n, k, best);
}

void best_of_groups(const float* value, int64_t n, int64_t k, const RouteRule& rule, int32_t* best) {
  const int64_t width = n / rule.num_groups;
  const int64_t count = rule.group_top(k);
  ScoreRow group_score;
  std::array<int32_t, kMaxExperts> kept;
  for (int64_t g = 0; g < rule.num_groups; ++g) group_score[g] = best_sum(value + g * width, width, count);
  best_of(group_score.data(), rule.num_groups, rule.topk_groups, kept.data());
  KeyRow key;
  std::fill(key.begin(), key.begin() + padded(n), kTaken);
  for (int64_t j = 0; j < rule.topk_groups; ++j) {
    for (int64_t i = kept[j] * width; i < (kept[j] + 1) * width; ++i) key[i] = key_of(value[i], i);
  }
  take_best(key, n, k, best);
}

ScoreFunction weight_score(const RouteRule& rule, int64_t top_k) {
  if (rule.choice != RouteChoice::sinkhorn) return rule.score;
  return top_k == 1 ? ScoreFunction::sigmoid : ScoreFunction::softmax;
}

void weigh_row(const RowWeights& row, float* weight) {
  const RouteRule& rule = row.rule;
  const float* const logits = row.logits;
  const int32_t* const chosen = row.chosen;
  const int64_t top_k = row.top_k;
  float sum = 0;
  if (rule.normalize && row.score == ScoreFunction::softmax) {
    // s / sum of s is the softmax over the chosen; this form has no 0/0 when a bias chose experts
    // whose scores vanish.
    float max = logits[chosen[0]];
    for (int64_t k = 1; k < top_k; ++k) max = std::max(max, logits[chosen[k]]);
    for (int64_t k = 0; k < top_k; ++k) sum += weight[k] = exp_f32(logits[chosen[k]] - max);
  } else {
    for (int64_t k = 0; k < top_k; ++k) sum += weight[k] = row.s[chosen[k]];
    sum = rule.normalize ? sum + 1e-20f : 1.0f;
  }
  for (int64_t k = 0; k < top_k; ++k) weight[k] = weight[k] / sum * rule.scale;
}

}  // namespace moebius::cpu
