// The learning rate of a step: OptimizerSpec::lr_at(), which config/train_spec.h declares with its formulas.
#include "config/train_spec.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace moebius {

namespace {

// Returns (step - begin) / (end - begin), from 0 to 1.
double progress(int64_t step, int64_t begin, int64_t end) {
  if (step >= end) return 1.0;
  return std::max(0.0, static_cast<double>(step - begin) / static_cast<double>(end - begin));
}

// Returns a weighted mean that is exactly a at w = 1 and exactly b at w = 0.
double mix(double a, double b, double w) { return a * w + b * (1.0 - w); }

}  // namespace

double OptimizerSpec::lr_at(int64_t step, int64_t num_steps) const {
  if (step <= warmup_steps) return lr * (static_cast<double>(step) / static_cast<double>(warmup_steps));
  const double p = progress(step, warmup_steps, num_steps);
  switch (schedule) {
    case LrSchedule::constant:
      return lr;
    case LrSchedule::cosine:
      return mix(lr, min_lr, 0.5 * (1.0 + std::cos(std::numbers::pi * p)));
    case LrSchedule::linear:
      return mix(lr, min_lr, 1.0 - p);
    case LrSchedule::wsd:
      break;
  }
  const int64_t decay = decay_steps > 0 ? decay_steps : std::max<int64_t>(1, num_steps / 10);
  return mix(lr, min_lr, 1.0 - progress(step, std::max(warmup_steps, num_steps - decay), num_steps));
}

}  // namespace moebius
