// The definitions of the elementwise operations that are more than one expression, in double.
#pragma once

#include <cmath>
#include <vector>

namespace moebius::ref {

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

inline void gated_add_fwd(std::vector<double>& y, const std::vector<double>& x, const std::vector<double>& gate) {
  const size_t width = gate.empty() ? 0 : x.size() / gate.size();
  for (size_t i = 0; i < x.size(); ++i) y[i] += sigmoid(gate[i / width]) * x[i];
}

inline void gated_add_bwd(std::vector<double>& dx, std::vector<double>& dgate, const std::vector<double>& dy,
                          const std::vector<double>& x, const std::vector<double>& gate) {
  const size_t width = gate.empty() ? 0 : x.size() / gate.size();
  dx.assign(x.size(), 0);
  dgate.assign(gate.size(), 0);
  for (size_t i = 0; i < x.size(); ++i) {
    const double g = sigmoid(gate[i / width]);
    dx[i] = g * dy[i];
    dgate[i / width] += g * (1 - g) * dy[i] * x[i];
  }
}

}  // namespace moebius::ref
