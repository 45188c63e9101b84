// The definitions of low_rank.h, in double. Tensors are row after row.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "ops/low_rank/low_rank.h"

namespace moebius::ref {

using LowRankValues = std::vector<double>;

// The rows of each matrix, and where x is read.
struct LowRankRows {
  std::vector<int64_t> offsets, token;  // token: empty, row r reads row r
  int64_t read(int64_t r) const { return token.empty() ? r : token[static_cast<size_t>(r)]; }
  int64_t num_matrices() const { return static_cast<int64_t>(offsets.size()) - 1; }
};

// A matrix: its values and the number of its columns.
struct LowRankMatrix {
  LowRankValues values;
  int64_t columns = 0;
  double& at(int64_t row, int64_t column) { return values[static_cast<size_t>(row * columns + column)]; }
  double at(int64_t row, int64_t column) const { return values[static_cast<size_t>(row * columns + column)]; }
};

// w: matrices of w_rows rows, one after another.
struct LowRankFactors {
  Columns y, x;
  int64_t w_rows = 0, w_first = 0;
  bool transposed = false, accumulate = false;
  double scale = 1;
};

inline void low_rank_product(LowRankMatrix& y, const LowRankMatrix& x, const LowRankMatrix& w, const LowRankRows& rows,
                             const LowRankFactors& f) {
  for (int64_t e = 0; e < rows.num_matrices(); ++e) {
    const int64_t first = e * f.w_rows + f.w_first;
    for (int64_t r = rows.offsets[e]; r < rows.offsets[e + 1]; ++r) {
      for (int64_t n = 0; n < f.y.count; ++n) {
        double sum = 0;
        for (int64_t k = 0; k < f.x.count; ++k)
          sum += x.at(rows.read(r), f.x.first + k) * (f.transposed ? w.at(first + k, n) : w.at(first + n, k));
        double& to = y.at(r, f.y.first + n);
        to = (f.accumulate ? to : 0) + f.scale * sum;
      }
    }
  }
}

struct LowRankSides {
  Columns left, right;
  int64_t w_rows = 0, w_first = 0;
  double scale = 1;
  bool gather_left = false, gather_right = false;
};

inline void low_rank_wgrad(LowRankMatrix& dw, const LowRankMatrix& left, const LowRankMatrix& right,
                           const LowRankRows& rows, const LowRankSides& f) {
  for (int64_t e = 0; e < rows.num_matrices(); ++e) {
    for (int64_t r = rows.offsets[e]; r < rows.offsets[e + 1]; ++r) {
      const int64_t i = f.gather_left ? rows.read(r) : r, j = f.gather_right ? rows.read(r) : r;
      for (int64_t m = 0; m < f.left.count; ++m) {
        for (int64_t n = 0; n < f.right.count; ++n)
          dw.at(e * f.w_rows + f.w_first + m, n) +=
              f.scale * left.at(i, f.left.first + m) * right.at(j, f.right.first + n);
      }
    }
  }
}

inline double gated(const GatedActivation& f, double gate, double up) {
  const double g = std::min(gate, double{f.limit}), u = std::clamp(up, -double{f.limit}, double{f.limit});
  return g / (1 + std::exp(-f.alpha * g)) * (u + f.shift);
}

// a of one row h [2F].
inline LowRankValues low_rank_activation(const LowRankValues& h, const GatedActivation& f) {
  const size_t F = h.size() / 2;
  LowRankValues a(F);
  for (size_t i = 0; i < F; ++i) a[i] = gated(f, h[i], h[F + i]);
  return a;
}

// weight <g, activation(h)> by h, of one row: by gate, then by up. Where a limit cut, 0.
inline LowRankValues d_low_rank_activation(const LowRankValues& h, const LowRankValues& g, double weight,
                                           const GatedActivation& f) {
  const size_t F = g.size();
  LowRankValues dh(2 * F);
  for (size_t i = 0; i < F; ++i) {
    const double gate = std::min(h[i], double{f.limit}), up = std::clamp(h[F + i], -double{f.limit}, double{f.limit});
    const double s = 1 / (1 + std::exp(-f.alpha * gate));
    dh[i] = h[i] > f.limit ? 0 : weight * g[i] * (up + f.shift) * s * (1 + f.alpha * gate * (1 - s));
    dh[F + i] = std::abs(h[F + i]) > f.limit ? 0 : weight * g[i] * gate * s;
  }
  return dh;
}

}  // namespace moebius::ref
