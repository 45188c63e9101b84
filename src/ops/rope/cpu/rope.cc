#include "ops/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/rstd.h"
#include "ops/cpu/vector.h"
#include "ops/rope/rope_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 8;  // of a task

// Computes one head: y = rotate(x).
template <class T>
void fwd_head(T* y, const T* x, const float* cos_sin, int64_t width) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(x[i]), b = to_f32(x[i + half]);
    y[i] = from_f32<T>(a * cos_sin[i] - b * sin[i]);
    y[i + half] = from_f32<T>(b * cos_sin[i] + a * sin[i]);
  }
}

// With norm: y = rotate(w * round(x rstd)).
template <class T>
void fwd_head_norm(T* y, const T* x, const T* w, const float* cos_sin, int64_t width, float rstd) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(w[i]) * to_f32(from_f32<T>(to_f32(x[i]) * rstd));
    const float b = to_f32(w[i + half]) * to_f32(from_f32<T>(to_f32(x[i + half]) * rstd));
    y[i] = from_f32<T>(a * cos_sin[i] - b * sin[i]);
    y[i + half] = from_f32<T>(b * cos_sin[i] + a * sin[i]);
  }
}

// Computes dx of one head without norm: dy rotated back.
template <class T>
void bwd_head(T* dx, const T* dy, const float* cos_sin, int64_t width) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(dy[i]), b = to_f32(dy[i + half]);
    dx[i] = from_f32<T>(a * cos_sin[i] + b * sin[i]);
    dx[i + half] = from_f32<T>(b * cos_sin[i] - a * sin[i]);
  }
}

// Returns the sum of g w x over one head, where g is dy rotated back.
template <class T>
float sum_of_products(const T* dy, const T* x, const T* w, const float* cos_sin, int64_t width) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(dy[i]), b = to_f32(dy[i + half]);
    sum += (a * cos_sin[i] + b * sin[i]) * to_f32(w[i]) * to_f32(x[i]);
    sum += (b * cos_sin[i] - a * sin[i]) * to_f32(w[i + half]) * to_f32(x[i + half]);
  }
  return sum;
}

// With norm: dw += g xhat; dx = rstd (g w - xhat mean), where mean is that of g w xhat over what is
// normalised together.
template <class T>
void bwd_head_norm(T* dx, float* dw, const T* dy, const T* x, const T* w, const float* cos_sin, int64_t width,
                   float rstd, float mean) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
#pragma omp simd
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(dy[i]), b = to_f32(dy[i + half]);
    const float g0 = a * cos_sin[i] + b * sin[i], g1 = b * cos_sin[i] - a * sin[i];
    const float xhat0 = to_f32(x[i]) * rstd, xhat1 = to_f32(x[i + half]) * rstd;
    dw[i] += g0 * xhat0;
    dw[i + half] += g1 * xhat1;
    dx[i] = from_f32<T>(rstd * (g0 * to_f32(w[i]) - xhat0 * mean));
    dx[i + half] = from_f32<T>(rstd * (g1 * to_f32(w[i + half]) - xhat1 * mean));
  }
}

const float* table_row(const Tensor& cos_sin_Pd, int32_t pos) {
  MOEBIUS_ASSERT(0 <= pos && pos < cos_sin_Pd.dim(0));
  return cos_sin_Pd.ptr<float>() + pos * cos_sin_Pd.dim(1);
}

// The heads of q or of k in a row. Weights of more elements than a head are those of all heads together.
struct RowHeads {
  int64_t heads, width;
  const Tensor& norm;
  const float* cos_sin;
  float eps;

  bool is_norm_of_all() const { return norm.numel() > width; }
  // Calls fn(first head, heads) for the heads that are normalised together.
  template <class F>
  void each_normed(F&& fn) const {
    if (is_norm_of_all()) return fn(int64_t{0}, heads);
    for (int64_t h = 0; h < heads; ++h) fn(h, int64_t{1});
  }
  template <class T>
  const T* weights(int64_t h) const {
    return norm.ptr<T>() + (is_norm_of_all() ? h * width : 0);
  }
};

template <class T>
void fwd_heads(const RowHeads& r, T* y, const T* x) {
  if (r.norm.empty()) {
    for (int64_t h = 0; h < r.heads; ++h) fwd_head(y + h * r.width, x + h * r.width, r.cos_sin, r.width);
    return;
  }
  r.each_normed([&](int64_t first, int64_t count) {
    const float rstd = rstd_of(x + first * r.width, count * r.width, r.eps);
    for (int64_t h = first; h < first + count; ++h)
      fwd_head_norm(y + h * r.width, x + h * r.width, r.weights<T>(h), r.cos_sin, r.width, rstd);
  });
}

// dw: the sums of the norm's gradient.
template <class T>
void bwd_heads(const RowHeads& r, T* dx, float* dw, const T* dy, const T* x) {
  if (r.norm.empty()) {
    for (int64_t h = 0; h < r.heads; ++h) bwd_head(dx + h * r.width, dy + h * r.width, r.cos_sin, r.width);
    return;
  }
  r.each_normed([&](int64_t first, int64_t count) {
    const int64_t width = count * r.width;
    const float rstd = rstd_of(x + first * r.width, width, r.eps);
    float products = 0;
    for (int64_t h = first; h < first + count; ++h)
      products += sum_of_products(dy + h * r.width, x + h * r.width, r.weights<T>(h), r.cos_sin, r.width);
    const float mean = products * (rstd / static_cast<float>(width));
    for (int64_t h = first; h < first + count; ++h) {
      const int64_t at = h * r.width;
      bwd_head_norm(dx + at, dw + (r.is_norm_of_all() ? at : 0), dy + at, x + at, r.weights<T>(h), r.cos_sin, r.width,
                    rstd, mean);
    }
  });
}

template <class T>
void fwd_rows(const RopeFwd& a, int64_t begin, int64_t end) {
  const int64_t heads = a.q_THd.dim(1), kv_heads = a.k_TGd.dim(1), width = a.q_THd.dim(2), row = a.qkv_TC.dim(1);
  const int64_t A = heads * width, B = kv_heads * width;
  for (int64_t t = begin; t < end; ++t) {
    const T* x = a.qkv_TC.ptr<T>() + t * row;
    const float* cos_sin = table_row(a.cos_sin_Pd, a.pos_T.ptr<int32_t>()[t]);
    fwd_heads({heads, width, a.q_norm_A, cos_sin, a.eps}, a.q_THd.ptr<T>() + t * A, x);
    fwd_heads({kv_heads, width, a.k_norm_B, cos_sin, a.eps}, a.k_TGd.ptr<T>() + t * B, x + A);
    std::memcpy(a.v_TGd.ptr<T>() + t * B, x + A + B, B * sizeof(T));
  }
}

// Returns the sums of the gradient of q's norm that a row of partial has; those of k's follow.
int64_t sums_of_q(const RopeBwd& a) { return a.q_norm_A.empty() ? a.dq_THd.dim(2) : a.q_norm_A.numel(); }

// partial: this task's sums, null without norms.
template <class T>
void bwd_rows(const RopeBwd& a, float* partial, int64_t begin, int64_t end) {
  const int64_t heads = a.dq_THd.dim(1), kv_heads = a.dk_TGd.dim(1), width = a.dq_THd.dim(2), row = a.qkv_TC.dim(1);
  const int64_t A = heads * width, B = kv_heads * width;
  for (int64_t t = begin; t < end; ++t) {
    const T* x = a.qkv_TC.ptr<T>() + t * row;
    T* dx = a.dqkv_TC.ptr<T>() + t * row;
    const float* cos_sin = table_row(a.cos_sin_Pd, a.pos_T.ptr<int32_t>()[t]);
    bwd_heads({heads, width, a.q_norm_A, cos_sin, a.eps}, dx, partial, a.dq_THd.ptr<T>() + t * A, x);
    bwd_heads({kv_heads, width, a.k_norm_B, cos_sin, a.eps}, dx + A, partial + sums_of_q(a), a.dk_TGd.ptr<T>() + t * B,
              x + A);
    std::memcpy(dx + A + B, a.dv_TGd.ptr<T>() + t * B, B * sizeof(T));
  }
}

}  // namespace

void rope_table(Stream& s, const RopeTable& a) {
  const int64_t width = a.cos_sin_Pd.dim(1), half = width / 2;
  parallel_rows(s.pool(), a.cos_sin_Pd.dim(0), 64, [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p) {
      float* row = a.cos_sin_Pd.ptr<float>() + p * width;
      for (int64_t i = 0; i < half; ++i) {
        const double frequency = a.frequencies.empty() ? std::pow(a.theta, -2.0 * i / width) : a.frequencies[i];
        row[i] = static_cast<float>(a.magnitude * std::cos(p * frequency));
        row[i + half] = static_cast<float>(a.magnitude * std::sin(p * frequency));
      }
    }
  });
}

void rope_fwd(Stream& s, const RopeFwd& a) {
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    parallel_rows(s.pool(), a.qkv_TC.dim(0), kRows,
                  [&](int64_t begin, int64_t end) { fwd_rows<decltype(zero)>(a, begin, end); });
  });
}

void rope_bwd(Stream& s, const RopeBwd& a) {
  const int64_t rows = a.qkv_TC.dim(0), num_partials = RopeBwd::num_partials(a, s);
  const int64_t rows_per_partial = div_ceil(rows, num_partials);
  const bool norm = !a.q_norm_A.empty() || !a.k_norm_B.empty();
  const int64_t W = norm ? a.partial_PW.dim(1) : 0, A = sums_of_q(a);
  float* partials = norm ? a.partial_PW.ptr<float>() : nullptr;
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    s.pool().run(num_partials, [&](int64_t p, int) {
      float* partial = norm ? partials + p * W : nullptr;
      if (norm) std::fill(partial, partial + W, 0.0f);
      bwd_rows<decltype(zero)>(a, partial, p * rows_per_partial, std::min(rows, (p + 1) * rows_per_partial));
    });
  });
  if (!a.q_norm_A.empty()) add_rows(s.pool(), a.dq_norm_A.ptr<float>(), partials, num_partials, A, W);
  if (!a.k_norm_B.empty()) add_rows(s.pool(), a.dk_norm_B.ptr<float>(), partials + A, num_partials, W - A, W);
}

}  // namespace moebius::cpu
