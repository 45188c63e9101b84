// The RoPE frequencies of a model, scaled for contexts longer than those of pre-training.
#pragma once

#include <vector>

#include "config/model_spec.h"

namespace moebius {

struct RopeFrequencies {
  std::vector<double> values;  // [rope_dim / 2]; empty: theta^(-2i/d)
  double magnitude = 1.0;      // factor of the cosines and sines
};

// With f = theta^(-2i/d):
//   linear  f / factor
//   llama3  wavelength w = 2 pi / f, n = original positions: f / factor where w > n / low, f where w < n / high,
//           between them (1 - s) f / factor + s f with s = (n / w - low) / (high - low)
//   yarn    (1 - r) f + r f / factor with r a ramp over i between the dims whose wavelengths turn beta_fast and
//           beta_slow times in n positions (Peng et al., arXiv 2309.00071); magnitude: attention_factor, or
//           m(mscale) / m(mscale_all_dim), or m(1), with m(x) = 0.1 x ln factor + 1
RopeFrequencies rope_frequencies(const ModelSpec& model);

// Returns the factor of 1/sqrt(head_dim) in the attention scores: m(mscale_all_dim)^2 with latent attention, else 1.
double attention_scale_of_rope(const ModelSpec& model);

}  // namespace moebius
