// The definitions of mla.h, in double.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

// Rows of `heads` heads, each `width` wide; the last 2 * frequency.size() columns turn, by
// pos * frequency[i] for pair i, and grow by the magnitude.
struct RotateHeads {
  std::vector<double> pos, frequency;
  int64_t heads, width;
  double magnitude;
  bool interleaved, transposed;
};

inline std::vector<double> rotate_heads(std::vector<double> x, const RotateHeads& a) {
  const int64_t half = static_cast<int64_t>(a.frequency.size());
  for (size_t head = 0; head < x.size() / a.width; ++head) {
    double* turned = &x[head * a.width + a.width - 2 * half];
    for (int64_t i = 0; i < half; ++i) {
      double& u = a.interleaved ? turned[2 * i] : turned[i];
      double& v = a.interleaved ? turned[2 * i + 1] : turned[half + i];
      const double angle = a.pos[head / a.heads] * a.frequency[i] * (a.transposed ? -1 : 1);
      const double first = a.magnitude * (u * std::cos(angle) - v * std::sin(angle));
      v = a.magnitude * (v * std::cos(angle) + u * std::sin(angle));
      u = first;
    }
  }
  return x;
}

struct LatentKv {
  int64_t rows, heads, n, r, v;
};

struct KeysValues {
  std::vector<double> k, v;
};

inline KeysValues latent_kv_fwd(const std::vector<double>& kv, const std::vector<double>& k_rope, const LatentKv& a) {
  KeysValues out;
  for (int64_t th = 0; th < a.rows * a.heads; ++th) {
    for (int64_t i = 0; i < a.n; ++i) out.k.push_back(kv[th * (a.n + a.v) + i]);
    for (int64_t i = 0; i < a.r; ++i) out.k.push_back(k_rope[th / a.heads * a.r + i]);
    for (int64_t i = 0; i < a.v; ++i) out.v.push_back(kv[th * (a.n + a.v) + a.n + i]);
  }
  return out;
}

struct LatentGrads {
  std::vector<double> kv, k_rope;
};

inline LatentGrads latent_kv_bwd(const KeysValues& d, const LatentKv& a) {
  LatentGrads out{std::vector<double>(a.rows * a.heads * (a.n + a.v)), std::vector<double>(a.rows * a.r)};
  for (int64_t th = 0; th < a.rows * a.heads; ++th) {
    for (int64_t i = 0; i < a.n; ++i) out.kv[th * (a.n + a.v) + i] = d.k[th * (a.n + a.r) + i];
    for (int64_t i = 0; i < a.r; ++i) out.k_rope[th / a.heads * a.r + i] += d.k[th * (a.n + a.r) + a.n + i];
    for (int64_t i = 0; i < a.v; ++i) out.kv[th * (a.n + a.v) + a.n + i] = d.v[th * a.v + i];
  }
  return out;
}

}  // namespace moebius::ref
