#include "model/attention/rope_frequencies.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace moebius {
namespace {

double yarn_magnitude(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

double llama3_frequency(double f, const RopeScaling& s) {
  const double turns = static_cast<double>(s.original_positions) * f / (2 * std::numbers::pi);
  if (turns < s.low_freq_factor) return f / s.factor;
  if (turns > s.high_freq_factor) return f;
  const double smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor);
  return (1 - smooth) * f / s.factor + smooth * f;
}

// The dims between which YaRN blends from the old frequencies to the stretched ones.
struct Ramp {
  double low, high;
  double at(double i) const { return std::clamp((i - low) / (high - low), 0.0, 1.0); }
};

Ramp yarn_ramp(const RopeScaling& s, double theta, double dim) {
  const auto dim_of = [&](double turns) {
    return dim * std::log(static_cast<double>(s.original_positions) / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(theta));
  };
  Ramp ramp{dim_of(s.beta_fast), dim_of(s.beta_slow)};
  if (s.truncate) ramp = {std::floor(ramp.low), std::ceil(ramp.high)};
  ramp = {std::max(ramp.low, 0.0), std::min(ramp.high, dim - 1)};
  if (ramp.low == ramp.high) ramp.high += 0.001;
  return ramp;
}

double magnitude_of(const RopeScaling& s) {
  if (s.type != RopeType::yarn) return 1.0;
  if (s.attention_factor != 0) return s.attention_factor;
  if (s.mscale != 0 && s.mscale_all_dim != 0)
    return yarn_magnitude(s.factor, s.mscale) / yarn_magnitude(s.factor, s.mscale_all_dim);
  return yarn_magnitude(s.factor, 1.0);
}

}  // namespace

RopeFrequencies rope_frequencies(const ModelSpec& m) {
  const RopeScaling& s = m.rope_scaling;
  RopeFrequencies out{.magnitude = magnitude_of(s)};
  if (s.type == RopeType::plain) return out;
  const int64_t dim = m.rope_dim();
  const Ramp ramp = s.type == RopeType::yarn ? yarn_ramp(s, m.rope_theta, static_cast<double>(dim)) : Ramp{0, 1};
  for (int64_t i = 0; i < dim / 2; ++i) {
    double f = std::pow(m.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(dim));
    if (s.type == RopeType::linear) f /= s.factor;
    if (s.type == RopeType::llama3) f = llama3_frequency(f, s);
    if (s.type == RopeType::yarn) {
      const double r = ramp.at(static_cast<double>(i));
      f = (1 - r) * f + r * f / s.factor;
    }
    out.values.push_back(f);
  }
  return out;
}

double attention_scale_of_rope(const ModelSpec& m) {
  const RopeScaling& s = m.rope_scaling;
  if (!m.is_latent() || s.type == RopeType::plain || s.mscale_all_dim == 0) return 1.0;
  const double magnitude = yarn_magnitude(s.factor, s.mscale_all_dim);
  return magnitude * magnitude;
}

}  // namespace moebius
