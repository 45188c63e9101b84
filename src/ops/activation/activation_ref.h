// The definition of swiglu, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

inline std::vector<double> swiglu_fwd(const std::vector<double>& h, int64_t width) {
  std::vector<double> a(h.size() / 2);
  for (size_t i = 0; i < a.size(); ++i) {
    const size_t g = i / width * 2 * width + i % width;
    a[i] = h[g] / (1 + std::exp(-h[g])) * h[g + width];
  }
  return a;
}

// silu'(g) = sigmoid(g) (1 + g (1 - sigmoid(g)))
inline std::vector<double> swiglu_bwd(const std::vector<double>& da, const std::vector<double>& h, int64_t width) {
  std::vector<double> dh(h.size());
  for (size_t i = 0; i < da.size(); ++i) {
    const size_t g = i / width * 2 * width + i % width;
    const double sigmoid = 1 / (1 + std::exp(-h[g]));
    dh[g] = da[i] * h[g + width] * sigmoid * (1 + h[g] * (1 - sigmoid));
    dh[g + width] = da[i] * h[g] * sigmoid;
  }
  return dh;
}

}  // namespace moebius::ref
