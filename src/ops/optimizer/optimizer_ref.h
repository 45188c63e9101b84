// The definitions of the optimizers, in double: AdamW as torch.optim.AdamW; SGD as torch.optim.SGD
// without its weight decay, and with that of AdamW.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

struct AdamW {
  std::vector<double>&master, &m, &v;
  const std::vector<double>& grad;
  double scale, lr, beta1, beta2, eps, weight_decay;
  int64_t step;
};

inline void adamw(const AdamW& a) {
  for (size_t i = 0; i < a.master.size(); ++i) {
    const double g = a.grad[i] * a.scale;
    a.m[i] = a.beta1 * a.m[i] + (1 - a.beta1) * g;
    a.v[i] = a.beta2 * a.v[i] + (1 - a.beta2) * g * g;
    const double m_hat = a.m[i] / (1 - std::pow(a.beta1, a.step)), v_hat = a.v[i] / (1 - std::pow(a.beta2, a.step));
    a.master[i] = a.master[i] * (1 - a.lr * a.weight_decay) - a.lr * m_hat / (std::sqrt(v_hat) + a.eps);
  }
}

struct Sgd {
  std::vector<double>&master, &m;
  const std::vector<double>& grad;
  double scale, lr, momentum, weight_decay;
};

inline void sgd(const Sgd& a) {
  for (size_t i = 0; i < a.master.size(); ++i) {
    a.m[i] = a.momentum * a.m[i] + a.grad[i] * a.scale;
    a.master[i] = a.master[i] * (1 - a.lr * a.weight_decay) - a.lr * a.m[i];
  }
}

}  // namespace moebius::ref
