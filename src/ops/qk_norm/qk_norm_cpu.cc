#include "ops/qk_norm/qk_norm.h"

#include <cmath>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/qk_norm/backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 64;  // of a task, as the partial sums

template <class T>
float rstd_of(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < width; ++j) squares += to_f32(x[j]) * to_f32(x[j]);
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

template <class T>
void normalise(T* y, const T* x, const T* w, int64_t width, float eps) {
  const float rstd = rstd_of(x, width, eps);
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) y[j] = from_f32<T>(to_f32(w[j]) * to_f32(from_f32<T>(to_f32(x[j]) * rstd)));
}

// dx of one part of a row; its weight's gradient is added to dw.
template <class T>
void normalise_bwd(T* dx, float* dw, const T* dy, const T* x, const T* w, int64_t width, float eps) {
  const float rstd = rstd_of(x, width, eps);
  float mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t j = 0; j < width; ++j) mean += to_f32(dy[j]) * to_f32(w[j]) * to_f32(x[j]);
  mean *= rstd / static_cast<float>(width);
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float dyj = to_f32(dy[j]), xhat = to_f32(x[j]) * rstd;
    dw[j] += dyj * xhat;
    dx[j] = from_f32<T>(rstd * (dyj * to_f32(w[j]) - xhat * mean));
  }
}

template <class T>
void fwd(Stream& s, const QkNormFwd& a) {
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B;
  parallel_rows(s.pool(), a.x_TC.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = a.x_TC.ptr<T>() + t * C;
      T* y = a.y_TC.ptr<T>() + t * C;
      normalise(y, x, a.q_norm_A.ptr<T>(), A, a.eps);
      normalise(y + A, x + A, a.k_norm_B.ptr<T>(), B, a.eps);
      std::memcpy(y + A + B, x + A + B, B * sizeof(T));
    }
  });
}

template <class T>
void bwd(Stream& s, const QkNormBwd& a) {
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B, W = A + B;
  parallel_rows(s.pool(), a.x_TC.dim(0), kRows, [&](int64_t begin, int64_t end) {
    float* partial = a.partial_PW.ptr<float>() + begin / kRows * W;
    std::fill(partial, partial + W, 0.0f);
    for (int64_t t = begin; t < end; ++t) {
      const T *x = a.x_TC.ptr<T>() + t * C, *dy = a.dy_TC.ptr<T>() + t * C;
      T* dx = a.dx_TC.ptr<T>() + t * C;
      normalise_bwd(dx, partial, dy, x, a.q_norm_A.ptr<T>(), A, a.eps);
      normalise_bwd(dx + A, partial + A, dy + A, x + A, a.k_norm_B.ptr<T>(), B, a.eps);
      std::memcpy(dx + A + B, dy + A + B, B * sizeof(T));
    }
  });
  const int64_t num_partials = a.partial_PW.dim(0);
  add_rows(s.pool(), a.dq_norm_A.ptr<float>(), a.partial_PW.ptr<float>(), num_partials, A, W);
  add_rows(s.pool(), a.dk_norm_B.ptr<float>(), a.partial_PW.ptr<float>() + A, num_partials, B, W);
}

}  // namespace

void qk_norm_fwd(Stream& s, const QkNormFwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) { fwd<decltype(zero)>(s, a); });
}

void qk_norm_bwd(Stream& s, const QkNormBwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) { bwd<decltype(zero)>(s, a); });
}

}  // namespace moebius::cpu
