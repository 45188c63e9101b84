// The definition of rope with its norms, in double, for the heads of one projection (q or k).
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

#include "ops/norm/norm_ref.h"

namespace moebius::ref {

// x is [T, heads, d]. w has d elements, or those of all heads, which are then normalised together; or it is empty.
struct Rope {
  std::vector<double> pos, w;
  int64_t heads, width;
  double theta, eps;
};

// Turns the pairs (i, i + d/2) of y by sign * pos * theta^(-2 i / d).
inline void rotate(std::vector<double>& y, const Rope& r, double sign) {
  const int64_t half = r.width / 2;
  for (size_t row = 0; row < y.size() / r.width; ++row) {
    for (int64_t i = 0; i < half; ++i) {
      const double angle = sign * r.pos[row / r.heads] * std::pow(r.theta, -2.0 * i / r.width);
      double &a = y[row * r.width + i], &b = y[row * r.width + i + half];
      const double turned = a * std::cos(angle) - b * std::sin(angle);
      b = b * std::cos(angle) + a * std::sin(angle);
      a = turned;
    }
  }
}

inline std::vector<double> rope_fwd(const std::vector<double>& x, const Rope& r) {
  std::vector<double> y = r.w.empty() ? x : rms_norm_fwd(x, {}, r.w, r.eps).y;
  rotate(y, r, 1);
  return y;
}

// Gives dx; dw accumulates.
inline std::vector<double> rope_bwd(std::vector<double>& dw, std::vector<double> dy, const std::vector<double>& x,
                                    const Rope& r) {
  rotate(dy, r, -1);
  if (r.w.empty()) return dy;
  std::vector<double> dx(x.size());
  rms_norm_bwd(dx, dw, dy, x, r.w, r.eps);
  return dx;
}

}  // namespace moebius::ref
