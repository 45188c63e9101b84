// The definitions of experts.h as plain loops in double.
#pragma once

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

// h[r,:] = w1[e] x[source(r),:]
inline Values expert_h(const ExpertShape& s, const Values& x, const Values& w1, int64_t R) {
  Values h(R * 2 * s.F);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t f = 0; f < 2 * s.F; ++f) {
      for (int64_t d = 0; d < s.D; ++d)
        h[r * 2 * s.F + f] += w1[(e * 2 * s.F + f) * s.D + d] * x[s.source(r) * s.D + d];
    }
  });
  return h;
}

inline Values swiglu_rows(const Values& h, int64_t R, int64_t F) {
  Values a(R * F);
  for (int64_t i = 0; i < R * F; ++i) {
    const double gate = h[i / F * 2 * F + i % F], up = h[i / F * 2 * F + F + i % F];
    a[i] = gate * sigmoid(gate) * up;
  }
  return a;
}

// y[r,:] = w2[e] a[r,:]
inline Values expert_y(const ExpertShape& s, const Values& a, const Values& w2, int64_t R) {
  Values y(R * s.D);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t d = 0; d < s.D; ++d) {
      for (int64_t f = 0; f < s.F; ++f) y[r * s.D + d] += w2[(e * s.D + d) * s.F + f] * a[r * s.F + f];
    }
  });
  return y;
}

struct ExpertBackward {
  Values dh, sa, dweight;
};
inline ExpertBackward d_expert_down(const ExpertShape& s, const Values& dout, const Values& w2, const Values& h,
                                    const Values& weight, int64_t R) {
  ExpertBackward b{Values(R * 2 * s.F), Values(R * s.F), Values(R)};
  const Values a = swiglu_rows(h, R, s.F);
  s.for_each_row([&](int64_t e, int64_t r) {
    for (int64_t f = 0; f < s.F; ++f) {
      double g = 0;
      for (int64_t d = 0; d < s.D; ++d) g += w2[(e * s.D + d) * s.F + f] * dout[s.source(r) * s.D + d];
      const double gate = h[r * 2 * s.F + f], up = h[r * 2 * s.F + s.F + f], z = sigmoid(gate);
      b.dweight[r] += g * a[r * s.F + f];
      b.sa[r * s.F + f] = weight[r] * a[r * s.F + f];
      b.dh[r * 2 * s.F + f] = weight[r] * g * up * z * (1 + gate * (1 - z));
      b.dh[r * 2 * s.F + s.F + f] = weight[r] * g * gate * z;
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

}  // namespace moebius::ref
