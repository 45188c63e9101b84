#include "data/blend.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "core/error.h"

namespace moebius {
namespace {

// Returns w times the power of ten that brings the sum to [1e12, 1e13). So weights of up to 12
// digits become exact integers.
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
                  "blend: expected finite weights > 0; got {}; correct the weight or drop the dataset", w);
  }
  const double sum = std::accumulate(weights.begin(), weights.end(), 0.0);
  MOEBIUS_CHECK(usage, std::isfinite(sum), "blend: expected weights with a finite sum; got {}; scale them down", sum);
  for (const double w : weights) share_.push_back(std::max<int64_t>(1, std::llround(scaled(w, sum))));
  int64_t factor = 0;
  for (const int64_t w : share_) factor = std::gcd(factor, w);
  for (int64_t& w : share_) w /= factor;
  total_ = std::accumulate(share_.begin(), share_.end(), int64_t{0});
  start_before(0);
}

// Moves to the last multiple of W that is not above `index`.
void Blend::start_before(int64_t index) {
  const int64_t rounds = index / total_;
  index_ = rounds * total_;
  error_.assign(share_.size(), 0);
  if (rounds == 0) error_ = share_;  // step 0 counts as one: max(i, 1)
  count_ = share_;
  for (int64_t& count : count_) count *= rounds;
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
  if (index < index_ || index / total_ > index_ / total_) start_before(index);
  while (index_ < index) advance();
  const int pick = furthest_behind();
  return {.dataset = pick, .ordinal = count_[pick]};
}

}  // namespace moebius
