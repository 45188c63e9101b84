// The definition of qk_norm, in double, by that of rms_norm on the two column blocks.
#pragma once

#include <vector>

#include "ops/norm/norm_ref.h"

namespace moebius::ref {

// Columns [begin, begin + width) of rows of C.
inline std::vector<double> columns(const std::vector<double>& x, size_t C, size_t begin, size_t width) {
  std::vector<double> out;
  for (size_t row = 0; row < x.size() / C; ++row) {
    for (size_t j = 0; j < width; ++j) out.push_back(x[row * C + begin + j]);
  }
  return out;
}

inline void put_columns(std::vector<double>& x, const std::vector<double>& from, size_t C, size_t begin, size_t width) {
  for (size_t row = 0; row < x.size() / C; ++row) {
    for (size_t j = 0; j < width; ++j) x[row * C + begin + j] = from[row * width + j];
  }
}

inline std::vector<double> qk_norm_fwd(const std::vector<double>& x, const std::vector<double>& q_norm,
                                       const std::vector<double>& k_norm, double eps) {
  const size_t A = q_norm.size(), B = k_norm.size(), C = A + 2 * B;
  std::vector<double> y = x;
  put_columns(y, rms_norm_fwd(columns(x, C, 0, A), {}, q_norm, eps).y, C, 0, A);
  put_columns(y, rms_norm_fwd(columns(x, C, A, B), {}, k_norm, eps).y, C, A, B);
  return y;
}

struct QkNormGrads {
  std::vector<double> dx, dq_norm, dk_norm;
};

inline QkNormGrads qk_norm_bwd(const std::vector<double>& dy, const std::vector<double>& x,
                               const std::vector<double>& q_norm, const std::vector<double>& k_norm, double eps) {
  const size_t A = q_norm.size(), B = k_norm.size(), C = A + 2 * B, rows = x.size() / C;
  QkNormGrads out{dy, std::vector<double>(A), std::vector<double>(B)};
  std::vector<double> dq(rows * A), dk(rows * B);
  rms_norm_bwd(dq, out.dq_norm, columns(dy, C, 0, A), columns(x, C, 0, A), q_norm, eps);
  rms_norm_bwd(dk, out.dk_norm, columns(dy, C, A, B), columns(x, C, A, B), k_norm, eps);
  put_columns(out.dx, dq, C, 0, A);
  put_columns(out.dx, dk, C, A, B);
  return out;
}

}  // namespace moebius::ref
