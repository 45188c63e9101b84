// The definition of newton_schulz.h, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

// c = a b, of [M, K] and [K, N]
inline std::vector<double> product(const std::vector<double>& a, const std::vector<double>& b, int64_t M, int64_t K,
                                   int64_t N) {
  std::vector<double> c(static_cast<size_t>(M * N));
  for (int64_t m = 0; m < M; ++m)
    for (int64_t k = 0; k < K; ++k)
      for (int64_t n = 0; n < N; ++n)
        c[static_cast<size_t>(m * N + n)] += a[static_cast<size_t>(m * K + k)] * b[static_cast<size_t>(k * N + n)];
  return c;
}

inline std::vector<double> transposed(const std::vector<double>& x, int64_t M, int64_t N) {
  std::vector<double> y(x.size());
  for (int64_t m = 0; m < M; ++m)
    for (int64_t n = 0; n < N; ++n) y[static_cast<size_t>(n * M + m)] = x[static_cast<size_t>(m * N + n)];
  return y;
}

inline std::vector<double> newton_schulz(std::vector<double> x, int64_t M, int64_t N, double factor) {
  if (M > N) return transposed(newton_schulz(transposed(x, M, N), N, M, factor), N, M);
  double squares = 0;
  for (const double v : x) squares += v * v;
  for (double& v : x) v /= std::sqrt(squares) + 1e-7;
  for (int step = 0; step < 5; ++step) {
    const std::vector<double> s = product(x, transposed(x, M, N), M, N, M), s2 = product(s, s, M, M, M);
    std::vector<double> b(s.size());
    for (size_t i = 0; i < b.size(); ++i) b[i] = -4.7750 * s[i] + 2.0315 * s2[i];
    const std::vector<double> bx = product(b, x, M, M, N);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + bx[i];
  }
  for (double& v : x) v *= factor;
  return x;
}

}  // namespace moebius::ref
