#include <array>
#include <cmath>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/qk_norm/qk_norm_backends.h"
#include "ops/qk_norm/qk_norm_blocks.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kRows = 64;  // of a task

// Columns [begin, begin + width) of a row are normed together over all ranks.
struct Part {
  int64_t begin, width;
  int index;  // 0: q, 1: k
  Tensor weight;
};
template <class Op>
std::array<Part, 2> parts_of(const Op& a) {
  const int64_t A = a.q_norm_A.numel(), B = a.k_norm_B.numel();
  return {Part{0, A, 0, a.q_norm_A}, Part{A, B, 1, a.k_norm_B}};
}

template <class Op>
float rstd_of(const Op& a, const Part& part, float squares) {
  return 1.0f / std::sqrt(squares / static_cast<float>(part.width * a.num_ranks) + a.eps);
}

template <class T>
float sum_of_squares(const T* x, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += to_f32(x[j]) * to_f32(x[j]);
  return sum;
}

template <class T>
float sum_of_products(const T* x, const T* y, const T* w, int64_t n) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t j = 0; j < n; ++j) sum += to_f32(x[j]) * to_f32(y[j]) * to_f32(w[j]);
  return sum;
}

// Calls fn(t, first element of row t) for every row.
template <class F>
void for_each_row(Stream& s, const Tensor& x_TC, F&& fn) {
  parallel_rows(s.pool(), x_TC.dim(0), kRows, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) fn(t, t * x_TC.dim(1));
  });
}

template <class T>
void sums(Stream& s, const QkNormSums& a) {
  const int64_t S = a.sums_TS.dim(1);
  const T *x = a.x_TC.ptr<T>(), *dy = a.dy_TC.empty() ? nullptr : a.dy_TC.ptr<T>();
  for_each_row(s, a.x_TC, [&](int64_t t, int64_t row) {
    float* out = a.sums_TS.ptr<float>() + t * S;
    for (const Part& p : parts_of(a)) {
      const int64_t at = row + p.begin;
      out[p.index] = sum_of_squares(x + at, p.width);
      if (dy) out[2 + p.index] = sum_of_products(dy + at, x + at, p.weight.ptr<T>(), p.width);
    }
  });
}

template <class T>
void fwd(Stream& s, const QkNormBlockFwd& a) {
  const int64_t C = a.x_TC.dim(1), B = a.k_norm_B.numel();
  const T* x = a.x_TC.ptr<T>();
  T* y = a.y_TC.ptr<T>();
  for_each_row(s, a.x_TC, [&](int64_t t, int64_t row) {
    for (const Part& p : parts_of(a)) {
      const float rstd = rstd_of(a, p, a.sums_T2.ptr<float>()[2 * t + p.index]);
      const T* w = p.weight.ptr<T>();
#pragma omp simd
      for (int64_t j = 0; j < p.width; ++j) {
        const int64_t at = row + p.begin + j;
        y[at] = from_f32<T>(to_f32(w[j]) * to_f32(from_f32<T>(to_f32(x[at]) * rstd)));
      }
    }
    std::memcpy(y + row + C - B, x + row + C - B, B * sizeof(T));
  });
}

template <class T>
void bwd_rows(Stream& s, const QkNormBlockBwd& a) {
  const T* x = a.x_TC.ptr<T>();
  T* dx = a.dx_TC.ptr<T>();
  for_each_row(s, a.x_TC, [&](int64_t t, int64_t row) {
    const float* sum = a.sums_T4.ptr<float>() + 4 * t;
    for (const Part& p : parts_of(a)) {
      const float rstd = rstd_of(a, p, sum[p.index]);
      const float mean = rstd * sum[2 + p.index] / static_cast<float>(p.width * a.num_ranks);
      const T* w = p.weight.ptr<T>();
#pragma omp simd
      for (int64_t j = 0; j < p.width; ++j) {
        const int64_t at = row + p.begin + j;
        dx[at] = from_f32<T>(rstd * (to_f32(dx[at]) * to_f32(w[j]) - to_f32(x[at]) * rstd * mean));
      }
    }
  });
}

// Processes columns [begin, end) of a part, so that no two tasks write the same sums.
template <class T>
void bwd_weight_columns(const QkNormBlockBwd& a, const Part& p, float* dw, int64_t begin, int64_t end) {
  for (int64_t t = 0; t < a.x_TC.dim(0); ++t) {
    const float rstd = rstd_of(a, p, a.sums_T4.ptr<float>()[4 * t + p.index]);
    const int64_t row = t * a.x_TC.dim(1) + p.begin;
    const T *x = a.x_TC.ptr<T>() + row, *dy = a.dx_TC.ptr<T>() + row;
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) dw[j] += to_f32(dy[j]) * (to_f32(x[j]) * rstd);
  }
}

}  // namespace

void qk_norm_sums(Stream& s, const QkNormSums& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) { sums<decltype(zero)>(s, a); });
}

void qk_norm_block_fwd(Stream& s, const QkNormBlockFwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) { fwd<decltype(zero)>(s, a); });
}

void qk_norm_block_bwd(Stream& s, const QkNormBlockBwd& a) {
  with_float_type(a.x_TC.dtype, [&](auto zero) {
    using T = decltype(zero);
    for (const Part& p : parts_of(a)) {
      float* dw = (p.index == 0 ? a.dq_norm_A : a.dk_norm_B).ptr<float>();
      parallel_rows(s.pool(), p.width, 128,
                    [&](int64_t begin, int64_t end) { bwd_weight_columns<T>(a, p, dw, begin, end); });
    }
    bwd_rows<T>(s, a);  // last, since it overwrites dy
  });
}

}  // namespace moebius::cpu
