#include "ops/rope/rope.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/rope/rope_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 8;  // of a task

template <class T>
float rstd_of(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t i = 0; i < width; ++i) squares += to_f32(x[i]) * to_f32(x[i]);
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// Computes one head: y = rotate(w * round(x rstd)), or rotate(x) without w.
template <class T>
void fwd_head(T* y, const T* x, const T* w, const float* cos_sin, int64_t width, float eps) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
  if (!w) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
      const float a = to_f32(x[i]), b = to_f32(x[i + half]);
      y[i] = from_f32<T>(a * cos_sin[i] - b * sin[i]);
      y[i + half] = from_f32<T>(b * cos_sin[i] + a * sin[i]);
    }
    return;
  }
  const float rstd = rstd_of(x, width, eps);
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

// With norm: g = dy rotated back; dw += g xhat; dx = rstd (g w - xhat mean(g w xhat)).
template <class T>
void bwd_head_norm(T* dx, float* dw, const T* dy, const T* x, const T* w, const float* cos_sin, int64_t width,
                   float eps) {
  const int64_t half = width / 2;
  const float* sin = cos_sin + half;
  const float rstd = rstd_of(x, width, eps);
  float mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t i = 0; i < half; ++i) {
    const float a = to_f32(dy[i]), b = to_f32(dy[i + half]);
    mean += (a * cos_sin[i] + b * sin[i]) * to_f32(w[i]) * to_f32(x[i]);
    mean += (b * cos_sin[i] - a * sin[i]) * to_f32(w[i + half]) * to_f32(x[i + half]);
  }
  mean *= rstd / static_cast<float>(width);
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

template <class T>
void fwd_rows(const RopeFwd& a, int64_t begin, int64_t end) {
  const int64_t heads = a.q_THd.dim(1), kv_heads = a.k_TGd.dim(1), width = a.q_THd.dim(2), row = a.qkv_TC.dim(1);
  const T* q_norm = a.q_norm_d.empty() ? nullptr : a.q_norm_d.ptr<T>();
  const T* k_norm = a.k_norm_d.empty() ? nullptr : a.k_norm_d.ptr<T>();
  for (int64_t t = begin; t < end; ++t) {
    const T* x = a.qkv_TC.ptr<T>() + t * row;
    const float* cos_sin = table_row(a.cos_sin_Pd, a.pos_T.ptr<int32_t>()[t]);
    T* q = a.q_THd.ptr<T>() + t * heads * width;
    T* k = a.k_TGd.ptr<T>() + t * kv_heads * width;
    for (int64_t h = 0; h < heads; ++h, x += width) fwd_head(q + h * width, x, q_norm, cos_sin, width, a.eps);
    for (int64_t h = 0; h < kv_heads; ++h, x += width) fwd_head(k + h * width, x, k_norm, cos_sin, width, a.eps);
    std::memcpy(a.v_TGd.ptr<T>() + t * kv_heads * width, x, kv_heads * width * sizeof(T));
  }
}

// partial: this task's [2 d] sums, null without norms.
template <class T>
void bwd_rows(const RopeBwd& a, float* partial, int64_t begin, int64_t end) {
  const int64_t heads = a.dq_THd.dim(1), kv_heads = a.dk_TGd.dim(1), width = a.dq_THd.dim(2), row = a.qkv_TC.dim(1);
  const auto bwd_heads = [&](T*& dx, const T*& x, const T* dy, int64_t n, const Tensor& norm, float* dw,
                             const float* cos_sin) {
    for (int64_t h = 0; h < n; ++h, dx += width, x += width, dy += width) {
      if (norm.empty())
        bwd_head(dx, dy, cos_sin, width);
      else
        bwd_head_norm(dx, dw, dy, x, norm.ptr<T>(), cos_sin, width, a.eps);
    }
  };
  for (int64_t t = begin; t < end; ++t) {
    const T* x = a.qkv_TC.ptr<T>() + t * row;
    T* dx = a.dqkv_TC.ptr<T>() + t * row;
    const float* cos_sin = table_row(a.cos_sin_Pd, a.pos_T.ptr<int32_t>()[t]);
    bwd_heads(dx, x, a.dq_THd.ptr<T>() + t * heads * width, heads, a.q_norm_d, partial, cos_sin);
    bwd_heads(dx, x, a.dk_TGd.ptr<T>() + t * kv_heads * width, kv_heads, a.k_norm_d, partial + width, cos_sin);
    std::memcpy(dx, a.dv_TGd.ptr<T>() + t * kv_heads * width, kv_heads * width * sizeof(T));
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
  const int64_t rows = a.qkv_TC.dim(0), width = a.dq_THd.dim(2), num_partials = RopeBwd::num_partials(rows, s);
  const int64_t rows_per_partial = div_ceil(rows, num_partials);
  const bool norm = !a.q_norm_d.empty() || !a.k_norm_d.empty();
  float* partials = norm ? a.partial_P2d.ptr<float>() : nullptr;
  with_float_type(a.qkv_TC.dtype, [&](auto zero) {
    s.pool().run(num_partials, [&](int64_t p, int) {
      float* partial = norm ? partials + p * 2 * width : nullptr;
      if (norm) std::fill(partial, partial + 2 * width, 0.0f);
      bwd_rows<decltype(zero)>(a, partial, p * rows_per_partial, std::min(rows, (p + 1) * rows_per_partial));
    });
  });
  if (!a.q_norm_d.empty()) add_rows(s.pool(), a.dq_norm_d.ptr<float>(), partials, num_partials, width, 2 * width);
  if (!a.k_norm_d.empty())
    add_rows(s.pool(), a.dk_norm_d.ptr<float>(), partials + width, num_partials, width, 2 * width);
}

}  // namespace moebius::cpu
