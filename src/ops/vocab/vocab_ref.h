// The definition of the language-model loss, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

struct LmLoss {
  std::vector<double> loss, dx, dw;
};

// dw starts at 0 here.
inline LmLoss lm_loss(const std::vector<double>& x, const std::vector<double>& w, const std::vector<double>& target,
                      const std::vector<double>& weight, int64_t width, double scale) {
  const int64_t tokens = weight.size(), vocab = w.size() / width;
  LmLoss out{std::vector<double>(tokens), std::vector<double>(x.size()), std::vector<double>(w.size())};
  std::vector<double> logits(vocab);
  for (int64_t t = 0; t < tokens; ++t) {
    if (weight[t] == 0) continue;
    double sum = 0;
    for (int64_t v = 0; v < vocab; ++v) {
      logits[v] = 0;
      for (int64_t j = 0; j < width; ++j) logits[v] += x[t * width + j] * w[v * width + j];
      sum += std::exp(logits[v]);
    }
    out.loss[t] = weight[t] * (std::log(sum) - logits[static_cast<int64_t>(target[t])]);
    for (int64_t v = 0; v < vocab; ++v) {
      const double d = scale * weight[t] * (std::exp(logits[v]) / sum - (v == target[t] ? 1 : 0));
      for (int64_t j = 0; j < width; ++j) {
        out.dx[t * width + j] += d * w[v * width + j];
        out.dw[v * width + j] += d * x[t * width + j];
      }
    }
  }
  return out;
}

}  // namespace moebius::ref
