// The definitions of clamp.h, in double.
#pragma once

#include <cmath>
#include <vector>

namespace moebius::ref {

inline std::vector<double> clamp_fwd(std::vector<double> x, double limit) {
  for (double& v : x) {
    if (std::abs(v) > limit) v = std::copysign(limit, v);
  }
  return x;
}

inline std::vector<double> clamp_bwd(std::vector<double> dy, const std::vector<double>& x, double limit) {
  for (size_t i = 0; i < x.size(); ++i) {
    if (!(std::abs(x[i]) <= limit)) dy[i] = 0;
  }
  return dy;
}

}  // namespace moebius::ref
