#include "ops/qk_norm/qk_norm.h"

#include <cstring>

#include "ops/norm/cpu/norm_rows.h"
#include "ops/qk_norm/qk_norm_backends.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 64;  // of a task, as ops/norm

template <class T>
void normalise(T* y, const T* x, const Tensor& w, float eps) {
  normalise_row(y, x, w.ptr<T>(), row_rstd(x, w.numel(), eps), w.numel());
}

template <class T>
void normalise_bwd(T* dx, float* dw, const T* dy, const T* x, const Tensor& w, float eps) {
  normalise_row_bwd<false>(dx, dw, dy, x, w.ptr<T>(), row_rstd(x, w.numel(), eps), w.numel());
}

template <class T>
void fwd(Stream& s, const QkNormFwd& a) {
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B;
  parallel_rows(s.pool(), a.x_TC.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* x = a.x_TC.ptr<T>() + t * C;
      T* y = a.y_TC.ptr<T>() + t * C;
      normalise(y, x, a.q_norm_A, a.eps);
      normalise(y + A, x + A, a.k_norm_B, a.eps);
      std::memcpy(y + A + B, x + A + B, B * sizeof(T));
    }
  });
}

template <class T>
void bwd(Stream& s, const QkNormBwd& a) {
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel(), C = A + 2 * B, W = A + B;
  const int64_t rows = a.x_TC.dim(0), num_partials = a.partial_PW.dim(0);
  const int64_t rows_per_partial = div_ceil(rows, num_partials);
  s.pool().run(num_partials, [&](int64_t p, int) {
    float* partial = a.partial_PW.ptr<float>() + p * W;
    std::fill(partial, partial + W, 0.0f);
    for (int64_t t = p * rows_per_partial; t < std::min(rows, (p + 1) * rows_per_partial); ++t) {
      const T *x = a.x_TC.ptr<T>() + t * C, *dy = a.dy_TC.ptr<T>() + t * C;
      T* dx = a.dx_TC.ptr<T>() + t * C;
      normalise_bwd(dx, partial, dy, x, a.q_norm_A, a.eps);
      normalise_bwd(dx + A, partial + A, dy + A, x + A, a.k_norm_B, a.eps);
      std::memcpy(dx + A + B, dy + A + B, B * sizeof(T));
    }
  });
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
