// The definitions of experts.h as plain loops in double.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

using Values = std::vector<double>;

struct ExpertShape {
  int64_t T, D, F;
  std::vector<int64_t> offsets;  // [e + 1]
  std::vector<int64_t> token;    // [R], empty: row r reads x[r]

  int64_t num_experts() const { return static_cast<int64_t>(offsets.size()) - 1; }
  int64_t source(int64_t r) const { return token.empty() ? r : token[r]; }
  // fn(expert, row) for the rows that exist.
  template <class Fn>
  void for_each_row(Fn&& fn) const {
    for (int64_t e = 0; e < num_experts(); ++e) {
      for (int64_t r = offsets[e]; r < offsets[e + 1]; ++r) fn(e, r);
    }
  }
};

inline double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

struct Activation {
  double alpha = 1, limit = INFINITY, shift = 0;
};

// h[r,:] = w1[e] x[source(r),:] + b1[e]; an empty b1 is none
inline Values expert_h(const ExpertShape& s, const Values& x, const Values& w1, int64_t R, const Values& b1 = {}) {
  Values h(R * 2 * s.F);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t f = 0; f < 2 * s.F; ++f) {
      if (!b1.empty()) h[r * 2 * s.F + f] = b1[e * 2 * s.F + f];
      for (int64_t d = 0; d < s.D; ++d)
        h[r * 2 * s.F + f] += w1[(e * 2 * s.F + f) * s.D + d] * x[s.source(r) * s.D + d];
    }
  });
  return h;
}

inline Values gated_rows(const Values& h, int64_t R, int64_t F, const Activation& f = {}) {
  Values a(R * F);
  for (int64_t i = 0; i < R * F; ++i) {
    const double gate = std::min(h[i / F * 2 * F + i % F], f.limit);
    const double up = std::max(std::min(h[i / F * 2 * F + F + i % F], f.limit), -f.limit);
    a[i] = gate * sigmoid(f.alpha * gate) * (up + f.shift);
  }
  return a;
}

// Columns [first, first + C) of a bias for each expert; C = 0: none.
struct ColumnBias {
  Values b;
  int64_t first = 0, C = 0;
  double at(int64_t e, int64_t d) const { return d >= first && d < first + C ? b[e * C + d - first] : 0; }
};

// y[r,:] = w2[e] a[r,:] + b2[e]
inline Values expert_y(const ExpertShape& s, const Values& a, const Values& w2, int64_t R, const ColumnBias& b2 = {}) {
  Values y(R * s.D);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t d = 0; d < s.D; ++d) {
      y[r * s.D + d] = b2.at(e, d);
      for (int64_t f = 0; f < s.F; ++f) y[r * s.D + d] += w2[(e * s.D + d) * s.F + f] * a[r * s.F + f];
    }
  });
  return y;
}

struct ExpertBackward {
  Values dh, sa, dweight;
};
inline ExpertBackward d_expert_down(const ExpertShape& s, const Values& dout, const Values& w2, const Values& h,
                                    const Values& weight, int64_t R, const Activation& act = {},
                                    const ColumnBias& b2 = {}) {
  ExpertBackward b{Values(R * 2 * s.F), Values(R * s.F), Values(R)};
  const Values a = gated_rows(h, R, s.F, act);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t d = 0; d < s.D; ++d) b.dweight[r] += b2.at(e, d) * dout[s.source(r) * s.D + d];
    for (int64_t f = 0; f < s.F; ++f) {
      double g = 0;
      for (int64_t d = 0; d < s.D; ++d) g += w2[(e * s.D + d) * s.F + f] * dout[s.source(r) * s.D + d];
      const double h_gate = h[r * 2 * s.F + f], h_up = h[r * 2 * s.F + s.F + f];
      const double gate = std::min(h_gate, act.limit), z = sigmoid(act.alpha * gate);
      const double up = std::max(std::min(h_up, act.limit), -act.limit) + act.shift;
      b.dweight[r] += g * a[r * s.F + f];
      b.sa[r * s.F + f] = weight[r] * a[r * s.F + f];
      if (h_gate <= act.limit) b.dh[r * 2 * s.F + f] = weight[r] * g * up * z * (1 + act.alpha * gate * (1 - z));
      if (std::abs(h_up) <= act.limit) b.dh[r * 2 * s.F + s.F + f] = weight[r] * g * gate * z;
    }
  });
  return b;
}

// dx[r,:] = w1[e]^T dh[r,:]
inline Values d_expert_up(const ExpertShape& s, const Values& dh, const Values& w1, int64_t R) {
  Values dx(R * s.D);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t f = 0; f < 2 * s.F; ++f) {
      for (int64_t d = 0; d < s.D; ++d) dx[r * s.D + d] += w1[(e * 2 * s.F + f) * s.D + d] * dh[r * 2 * s.F + f];
    }
  });
  return dx;
}

// dw[e] += sum over rows of left[i]^T right[j], i and j the row or its source.
inline void expert_wgrad(const ExpertShape& s, Values& dw, const Values& left, const Values& right, int64_t M,
                         int64_t N, bool gather_left, bool gather_right) {
  s.for_each_row([&](int64_t e, int64_t r) {
    const int64_t i = gather_left ? s.source(r) : r, j = gather_right ? s.source(r) : r;
    for (int64_t m = 0; m < M; ++m) {
      for (int64_t n = 0; n < N; ++n) dw[(e * M + m) * N + n] += left[i * M + m] * right[j * N + n];
    }
  });
}

// db[e,n] += sum over the rows of e of weight x, weight 1 when empty; x is [., M]
inline void expert_bias_grad(const ExpertShape& s, Values& db, const Values& x, int64_t M, int64_t first,
                             const Values& weight, bool gather) {
  const int64_t N = static_cast<int64_t>(db.size()) / s.num_experts();
  s.for_each_row([&](int64_t e, int64_t r) {
    const double w = weight.empty() ? 1 : weight[r];
    for (int64_t n = 0; n < N; ++n) db[e * N + n] += w * x[(gather ? s.source(r) : r) * M + first + n];
  });
}

}  // namespace moebius::ref
