#include "io/blend.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace moebius {
namespace {

// w times the power of ten that brings the sum to [1e12, 1e13): weights of up to 12 digits become exact integers.
double scaled(double w, double sum) {
  for (; sum < 1e12; sum *= 10) w *= 10;
  for (; sum >= 1e13; sum /= 10) w /= 10;
  return w;
}

}  // namespace

Blend::Blend(const std::vector<double>& weights) {
  MOEBIUS_CHECK(usage, !weights.empty(), "blend: expected at least one dataset; got none; list some");
  for (const double w : weights) {
    MOEBIUS_CHECK(usage, std::isfinite(w) && w > 0,
                  "blend: expected finite weights > 0; got {}; correct or drop the dataset", w);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  MOEBIUS_CHECK(usage, std::isfinite(sum), "blend: expected weights with a finite sum; got {}; scale them down", sum);
  for (const double w : weights) share_.push_back(std::max<int64_t>(1, std::llround(scaled(w, sum))));
  total_ = std::accumulate(share_.begin(), share_.end(), int64_t{0});
  restart();
}

void Blend::restart() {
  error_ = share_;  // step 0 counts as one: max(i, 1)
  count_.assign(share_.size(), 0);
  index_ = 0;
}

int Blend::furthest_behind() const {
  return static_cast<int>(std::max_element(error_.begin(), error_.end()) - error_.begin());
}

void Blend::advance() {
  const int pick = furthest_behind();
  ++count_[pick];
  error_[pick] -= total_;
  if (++index_ == 1) return;  // steps 0 and 1 have the same factor
  for (size_t j = 0; j < error_.size(); ++j) error_[j] += share_[j];
}

Blend::Pick Blend::at(int64_t index) {
  MOEBIUS_ASSERT(index >= 0);
  if (share_.size() == 1) return {.dataset = 0, .ordinal = index};
  if (index < index_) restart();
  while (index_ < index) advance();
  const int pick = furthest_behind();
  return {.dataset = pick, .ordinal = count_[pick]};
}

}  // namespace moebius
