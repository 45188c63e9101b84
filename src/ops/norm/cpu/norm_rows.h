// RMS normalisation of one row on the CPU: of ops/norm, and of ops/qk_norm, whose rows are parts of
// wider ones.
#pragma once

#include <cmath>

#include "ops/cpu/vector.h"

namespace moebius::cpu {

template <class T>
float row_rstd(const T* x, int64_t width, float eps) {
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (int64_t j = 0; j < width; ++j) squares += to_f32(x[j]) * to_f32(x[j]);
  return 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
}

// y = w * round(x * rstd).
template <class T>
void normalise_row(T* y, const T* x, const T* w, float rstd, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) y[j] = from_f32<T>(to_f32(w[j]) * to_f32(from_f32<T>(to_f32(x[j]) * rstd)));
}

// Adds a row's gradient to the partial dw, and adds to dx or overwrites it.
template <bool kAddDx, class T>
void normalise_row_bwd(T* dx, float* dw, const T* dy, const T* x, const T* w, float rstd, int64_t width) {
  float mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t j = 0; j < width; ++j) mean += to_f32(dy[j]) * to_f32(w[j]) * to_f32(x[j]);
  mean *= rstd / static_cast<float>(width);
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float dyj = to_f32(dy[j]), xhat = to_f32(x[j]) * rstd;
    dw[j] += dyj * xhat;
    const float gradient = rstd * (dyj * to_f32(w[j]) - xhat * mean);
    dx[j] = from_f32<T>(kAddDx ? to_f32(dx[j]) + gradient : gradient);
  }
}

}  // namespace moebius::cpu
