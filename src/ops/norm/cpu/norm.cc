#include "ops/norm/norm.h"

#include "ops/cpu/rstd.h"
#include "ops/cpu/vector.h"
#include "ops/norm/norm_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 8;  // of a task

// y = w * round(x * rstd).
template <class T>
void normalise_row(T* y, const T* x, const T* w, float rstd, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) y[j] = from_f32<T>(to_f32(w[j]) * to_f32(from_f32<T>(to_f32(x[j]) * rstd)));
}

// Adds a row's gradients to dx and to the partial dw.
template <class T>
void normalise_row_bwd(T* dx, float* dw, const T* dy, const T* x, const T* w, float rstd, int64_t width) {
  float mean = 0;
#pragma omp simd reduction(+ : mean)
  for (int64_t j = 0; j < width; ++j) mean += to_f32(dy[j]) * to_f32(w[j]) * to_f32(x[j]);
  mean *= rstd / static_cast<float>(width);
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) {
    const float dyj = to_f32(dy[j]), xhat = to_f32(x[j]) * rstd;
    dw[j] += dyj * xhat;
    dx[j] = from_f32<T>(to_f32(dx[j]) + rstd * (dyj * to_f32(w[j]) - xhat * mean));
  }
}

template <class T>
void add_row(T* sum, const T* x, const T* residual, int64_t width) {
#pragma omp simd
  for (int64_t j = 0; j < width; ++j) sum[j] = from_f32<T>(to_f32(x[j]) + to_f32(residual[j]));
}

template <class T>
void fwd(Stream& s, const RmsNormFwd& a) {
  const int64_t width = a.x_TD.dim(1);
  parallel_rows(s.pool(), a.x_TD.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = a.x_TD.ptr<T>() + t * width;
      if (!a.residual_TD.empty()) {
        T* sum = a.sum_TD.ptr<T>() + t * width;
        add_row(sum, x, a.residual_TD.ptr<T>() + t * width, width);
        x = sum;
      }
      const float rstd = rstd_of(x, width, a.eps);
      a.rstd_T.ptr<float>()[t] = rstd;
      normalise_row(a.y_TD.ptr<T>() + t * width, x, a.w_D.ptr<T>(), rstd, width);
    }
  });
}

template <class T>
void bwd(Stream& s, const RmsNormBwd& a) {
  const int64_t rows = a.x_TD.dim(0), width = a.x_TD.dim(1), num_partials = a.partial_PD.dim(0);
  const int64_t rows_per_partial = div_ceil(rows, num_partials);
  s.pool().run(num_partials, [&](int64_t p, int) {
    float* partial = a.partial_PD.ptr<float>() + p * width;
    std::fill(partial, partial + width, 0.0f);
    for (int64_t t = p * rows_per_partial; t < std::min(rows, (p + 1) * rows_per_partial); ++t) {
      normalise_row_bwd(a.dx_TD.ptr<T>() + t * width, partial, a.dy_TD.ptr<T>() + t * width,
                        a.x_TD.ptr<T>() + t * width, a.w_D.ptr<T>(), a.rstd_T.ptr<float>()[t], width);
    }
  });
  add_rows(s.pool(), a.dw_D.ptr<float>(), a.partial_PD.ptr<float>(), num_partials, width, width);
}

}  // namespace

void rms_norm_fwd(Stream& s, const RmsNormFwd& a) {
  with_float_type(a.x_TD.dtype, [&](auto zero) { fwd<decltype(zero)>(s, a); });
}

void rms_norm_bwd(Stream& s, const RmsNormBwd& a) {
  with_float_type(a.x_TD.dtype, [&](auto zero) { bwd<decltype(zero)>(s, a); });
}

}  // namespace moebius::cpu
