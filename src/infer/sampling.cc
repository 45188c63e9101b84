#include "infer/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "core/error.h"
#include "core/rng.h"
#include "ops/draw/draw.h"

namespace moebius {
namespace {

struct Largest {
  float logit;
  bool all_finite;
};

// One pass over the logits, several at a time, since vocabularies are large.
Largest largest_of(std::span<const float> logits) {
  float top = -std::numeric_limits<float>::infinity();
  int64_t num_odd = 0;
  const int64_t n = std::ssize(logits);
#pragma omp simd reduction(max : top) reduction(+ : num_odd)
  for (int64_t i = 0; i < n; ++i) {
    const float x = logits[static_cast<size_t>(i)];
    top = x > top ? x : top;
    num_odd += !(std::abs(x) <= std::numeric_limits<float>::max());
  }
  return {top, num_odd == 0};
}

std::vector<float> penalised(std::span<const float> logits, std::span<const int32_t> text, double penalty) {
  std::vector<float> changed(logits.begin(), logits.end());
  for (const int32_t id : text) {
    if (id >= std::ssize(logits)) continue;
    const double logit = logits[static_cast<size_t>(id)];
    changed[static_cast<size_t>(id)] = static_cast<float>(logit > 0 ? logit / penalty : logit * penalty);
  }
  return changed;
}

// Token ids by falling probability, as far as they are asked for: few are, of a large vocabulary.
class Ranking {
  // Between two equal logits, the one with the higher id is below.
  auto is_below() const {
    return [this](int32_t a, int32_t b) { return logits_[a] != logits_[b] ? logits_[a] < logits_[b] : a > b; };
  }

 public:
  Ranking(std::span<const float> logits, double temperature)
      : logits_(logits), temperature_(temperature), heap_(logits.size()) {
    std::iota(heap_.begin(), heap_.end(), 0);
    std::make_heap(heap_.begin(), heap_.end(), is_below());
    top_ = logits[heap_.front()];
  }
  int64_t size() const { return std::ssize(logits_); }
  int32_t id(int64_t rank) {
    while (std::ssize(ranked_) <= rank) {
      std::pop_heap(heap_.begin(), heap_.end(), is_below());
      ranked_.push_back(heap_.back());
      heap_.pop_back();
    }
    return ranked_[static_cast<size_t>(rank)];
  }
  // exp((logit - largest) / temperature)
  double mass(int64_t rank) { return mass_of(logits_[static_cast<size_t>(id(rank))]); }
  double total(int64_t num_ranks) {
    double sum = 0;
    if (num_ranks == size()) {
      for (const float logit : logits_) sum += mass_of(logit);
      return sum;
    }
    for (int64_t i = 0; i < num_ranks; ++i) sum += mass(i);
    return sum;
  }

 private:
  double mass_of(float logit) const { return std::exp((logit - top_) / temperature_); }

  std::span<const float> logits_;
  double temperature_, top_ = 0;
  std::vector<int32_t> heap_, ranked_;
};

}  // namespace

void check_sampling(const Sampling& s) {
  MOEBIUS_CHECK(usage, std::isfinite(s.temperature) && s.temperature >= 0,
                "generate: temperature must be 0 or more; got {}", s.temperature);
  MOEBIUS_CHECK(usage, s.top_k >= 0, "generate: top-k must be 0 or more; got {}", s.top_k);
  MOEBIUS_CHECK(usage, s.top_p > 0 && s.top_p <= 1, "generate: top-p must be in (0, 1]; got {}", s.top_p);
  MOEBIUS_CHECK(usage, s.min_p >= 0 && s.min_p <= 1, "generate: min-p must be in [0, 1]; got {}", s.min_p);
  MOEBIUS_CHECK(usage, std::isfinite(s.repetition_penalty) && s.repetition_penalty > 0,
                "generate: repetition-penalty must be above 0; got {}", s.repetition_penalty);
}

bool is_plain(const Sampling& s) {
  const bool keeps_all = s.top_k == 0 && s.top_p == 1 && s.min_p == 0;
  return s.repetition_penalty == 1 && (keeps_all || s.temperature == 0);
}

void fail_not_finite(int64_t position) {
  MOEBIUS_FAIL(numerics,
               "generate: expected finite logits for position {}; got NaN or Inf; "
               "the model is damaged or its dtype is too narrow",
               position);
}

int32_t sample_token(std::span<const float> logits, const Sampling& sampling, int64_t position,
                     std::span<const int32_t> text) {
  MOEBIUS_ASSERT(!logits.empty());
  Largest largest = largest_of(logits);
  if (!largest.all_finite) fail_not_finite(position);
  const float uniform = Rng(sampling.seed, RngSite::sampling).uniform(static_cast<uint64_t>(position));
  if (is_plain(sampling)) return draw_token(logits, sampling.temperature, uniform);
  std::vector<float> changed;
  if (sampling.repetition_penalty != 1) {
    logits = changed = penalised(logits, text, sampling.repetition_penalty);
    largest = largest_of(logits);
  }
  if (sampling.temperature == 0)
    return static_cast<int32_t>(std::find(logits.begin(), logits.end(), largest.logit) - logits.begin());
  Ranking r(logits, sampling.temperature);
  int64_t kept = sampling.top_k > 0 ? std::min(sampling.top_k, r.size()) : r.size();
  double nucleus = r.total(kept);
  if (sampling.top_p < 1) {
    const double wanted = sampling.top_p * nucleus;
    const int64_t most = kept;
    for (kept = 0, nucleus = 0; kept < most && nucleus < wanted;) nucleus += r.mass(kept++);
  }
  if (sampling.min_p > 0) {
    const int64_t most = kept;
    for (kept = 0, nucleus = 0; kept < most && r.mass(kept) >= sampling.min_p;) nucleus += r.mass(kept++);
  }
  const double draw = nucleus * uniform;
  double passed = 0;
  for (int64_t i = 0; i + 1 < kept; ++i) {
    passed += r.mass(i);
    if (draw < passed) return r.id(i);
  }
  return r.id(kept - 1);
}

}  // namespace moebius
