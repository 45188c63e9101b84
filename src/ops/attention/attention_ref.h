// The definition of attention, in double, with its whole matrix of probabilities.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace moebius::ref {

struct Attention {
  std::vector<double> q, k, v;
  std::vector<double> doc_start;                                 // empty: 0
  int64_t batch, rows, kv_rows, heads, kv_heads, width, window;  // rows of one sequence
  double scale;
  int64_t v_width = 0;       // 0: width
  std::vector<double> sink;  // of each head, empty: none

  int64_t out_width() const { return v_width > 0 ? v_width : width; }
  int64_t v_offset(int64_t b, int64_t j, int64_t h) const { return kv_offset(b, j, h) / width * out_width(); }
  const double* q_at(int64_t b, int64_t i, int64_t h) const { return &q[((b * rows + i) * heads + h) * width]; }
  int64_t kv_offset(int64_t b, int64_t j, int64_t h) const {
    return ((b * kv_rows + j) * kv_heads + h / (heads / kv_heads)) * width;
  }
};

inline double dot(const double* x, const double* y, int64_t n) {
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * y[i];
  return sum;
}

// Probabilities of the keys of one query, 0 where unseen; gives the log of the sum of exponentials.
inline double attention_row(std::vector<double>& p, const Attention& a, int64_t b, int64_t i, int64_t h) {
  const int64_t position = a.kv_rows - a.rows + i;
  int64_t first = a.doc_start.empty() ? 0 : static_cast<int64_t>(a.doc_start[b * a.rows + i]);
  if (a.window > 0) first = std::max(first, position - a.window + 1);
  p.assign(a.kv_rows, 0);
  double sum = 0;
  for (int64_t j = first; j <= position; ++j)
    sum += p[j] = std::exp(a.scale * dot(a.q_at(b, i, h), &a.k[a.kv_offset(b, j, h)], a.width));
  if (!a.sink.empty()) sum += std::exp(a.sink[h]);
  for (double& x : p) x /= sum;
  return std::log(sum);
}

struct AttentionOut {
  std::vector<double> o, lse;
};

inline AttentionOut attention_fwd(const Attention& a) {
  const int64_t width = a.out_width();
  AttentionOut out{std::vector<double>(a.q.size() / a.width * width), std::vector<double>(a.batch * a.rows * a.heads)};
  std::vector<double> p;
  for (int64_t n = 0; n < a.batch * a.rows * a.heads; ++n) {
    const int64_t h = n % a.heads, i = n / a.heads % a.rows, b = n / a.heads / a.rows;
    out.lse[n] = attention_row(p, a, b, i, h);
    for (int64_t j = 0; j < a.kv_rows; ++j) {
      for (int64_t c = 0; c < width; ++c) out.o[n * width + c] += p[j] * a.v[a.v_offset(b, j, h) + c];
    }
  }
  return out;
}

struct AttentionGrads {
  std::vector<double> dq, dk, dv;
};

// With p the probabilities: dp = do v^T, ds = p (dp - <p, dp>), dq = scale ds k, dk = scale ds^T q,
// dv = p^T do.
inline AttentionGrads attention_bwd(const Attention& a, const std::vector<double>& dout) {
  AttentionGrads g{std::vector<double>(a.q.size()), std::vector<double>(a.k.size()), std::vector<double>(a.v.size())};
  std::vector<double> p, dp(a.kv_rows);
  const int64_t v_width = a.out_width();
  for (int64_t n = 0; n < a.batch * a.rows * a.heads; ++n) {
    const int64_t h = n % a.heads, i = n / a.heads % a.rows, b = n / a.heads / a.rows;
    attention_row(p, a, b, i, h);
    for (int64_t j = 0; j < a.kv_rows; ++j) dp[j] = dot(&dout[n * v_width], &a.v[a.v_offset(b, j, h)], v_width);
    const double mean = dot(p.data(), dp.data(), a.kv_rows);
    for (int64_t j = 0; j < a.kv_rows; ++j) {
      const double ds = a.scale * p[j] * (dp[j] - mean);
      const int64_t kv = a.kv_offset(b, j, h);
      for (int64_t c = 0; c < a.width; ++c) {
        g.dq[n * a.width + c] += ds * a.k[kv + c];
        g.dk[kv + c] += ds * a.q[n * a.width + c];
      }
      for (int64_t c = 0; c < v_width; ++c) g.dv[a.v_offset(b, j, h) + c] += p[j] * dout[n * v_width + c];
    }
  }
  return g;
}

// o and lse of attention without a sink become those with one.
inline void attention_sink_fwd(std::vector<double>& o, std::vector<double>& lse, const std::vector<double>& sink) {
  for (size_t i = 0; i < lse.size(); ++i) {
    const double with_sink = std::log(std::exp(lse[i]) + std::exp(sink[i % sink.size()]));
    const size_t width = o.size() / lse.size();
    for (size_t c = 0; c < width; ++c) o[i * width + c] *= std::exp(lse[i] - with_sink);
    lse[i] = with_sink;
  }
}

inline std::vector<double> attention_sink_bwd(const std::vector<double>& dout, const std::vector<double>& o,
                                              const std::vector<double>& lse, const std::vector<double>& sink) {
  std::vector<double> dsink(sink.size());
  for (size_t i = 0; i < lse.size(); ++i) {
    const int64_t h = static_cast<int64_t>(i % sink.size()), width = static_cast<int64_t>(o.size() / lse.size());
    const int64_t at = static_cast<int64_t>(i) * width;
    dsink[h] -= std::exp(sink[h] - lse[i]) * dot(&dout[at], &o[at], width);
  }
  return dsink;
}

}  // namespace moebius::ref
