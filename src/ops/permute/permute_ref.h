// The definitions of permute.h as plain loops in double.
#pragma once

#include <cstdint>
#include <vector>

namespace moebius::ref {

// out[t,:] (+)= sum over k of weight[t,k] y[pair_row[t,k],:]; weight empty: ones.
inline void combine(std::vector<double>& out, const std::vector<double>& y, const std::vector<double>& pair_row,
                    const std::vector<double>& weight, int64_t T, int64_t K, int64_t D, bool accumulate) {
  for (int64_t t = 0; t < T; ++t) {
    for (int64_t d = 0; d < D; ++d) {
      double sum = 0;
      for (int64_t k = 0; k < K; ++k) {
        const auto row = static_cast<int64_t>(pair_row[t * K + k]);
        if (row >= 0) sum += (weight.empty() ? 1.0 : weight[t * K + k]) * y[row * D + d];
      }
      out[t * D + d] = sum + (accumulate ? out[t * D + d] : 0.0);
    }
  }
}

}  // namespace moebius::ref
