// The definition of gemm, in double.
#pragma once

#include <cstdint>
#include <vector>

namespace moebius::ref {

// c[m, n] = (accumulate: c +) sum over k of op(a)[m, k] op(b)[k, n]
struct Gemm {
  std::vector<double>& c;
  const std::vector<double>&a, &b;
  int64_t m, n, k;
  bool trans_a = false, trans_b = false, accumulate = false;
};

inline void gemm(const Gemm& g) {
  g.c.resize(g.m * g.n);
  for (int64_t i = 0; i < g.m; ++i) {
    for (int64_t j = 0; j < g.n; ++j) {
      double sum = g.accumulate ? g.c[i * g.n + j] : 0;
      for (int64_t l = 0; l < g.k; ++l) {
        sum += g.a[g.trans_a ? l * g.m + i : i * g.k + l] * g.b[g.trans_b ? j * g.k + l : l * g.n + j];
      }
      g.c[i * g.n + j] = sum;
    }
  }
}

}  // namespace moebius::ref
