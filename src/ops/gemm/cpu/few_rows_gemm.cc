#include "ops/gemm/cpu/few_rows_gemm.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <utility>

#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;  // of W: enough for a task, and few enough for many tasks
constexpr int kMostRows = 6;               // of a kernel

// sums[i * N + j] = sum over k of x[i][k] w[j][k], for M rows of x and N of w, each of k elements.
template <int M, int N, class T>
void multiply_lanes(float* sums, const T* x, const T* w, int64_t k) {
  Lanes sum[M][N] = {};
  for (int64_t p = 0; p < k; p += kNumLanes) {
    const int64_t n = std::min(kNumLanes, k - p);
    Lanes row[N];
    for (int j = 0; j < N; ++j) row[j] = load_lanes(w + j * k + p, n);
    for (int i = 0; i < M; ++i) {
      const Lanes value = load_lanes(x + i * k + p, n);
      for (int j = 0; j < N; ++j) sum[i][j] += value * row[j];
    }
  }
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) sums[i * N + j] = sum_lanes(sum[i][j]);
}

// _mm512_reduce_add_ps, of which g++ 12 warns.
[[gnu::target("avx512f")]] float sum_wide(__m512 v) {
  float x[16];
  _mm512_storeu_ps(x, v);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x[i] += x[i + width];
  return x[0];
}

// The same by vdpbf16ps, which adds a pair of products to each lane.
template <int M, int N>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void multiply_pairs(float* sums, const bf16* x, const bf16* w,
                                                                            int64_t k) {
  constexpr int64_t kStep = 32;
  __m512 sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = _mm512_setzero_ps();
  for (int64_t p = 0; p < k; p += kStep) {
    const __mmask32 mask = k - p >= kStep ? ~__mmask32{0} : (__mmask32{1} << (k - p)) - 1;
    __m512bh row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + j * k + p);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const __m512bh value = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + i * k + p);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], value, row[j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sums[i * N + j] = sum_wide(sum[i][j]);
}

template <class T>
using Multiply = void (*)(float*, const T*, const T*, int64_t);

// The kernels for 1 to kMostRows rows of x, by the number of rows of W at once.
template <class T>
struct Kernels {
  std::array<Multiply<T>, kMostRows> four, one;
  Multiply<T> eight_of_one_row;
};

template <class T, int... M>
constexpr Kernels<T> by_lanes(std::integer_sequence<int, M...>) {
  return {{multiply_lanes<M + 1, 4, T>...}, {multiply_lanes<M + 1, 1, T>...}, multiply_lanes<1, 8, T>};
}
template <int... M>
constexpr Kernels<bf16> by_pairs(std::integer_sequence<int, M...>) {
  return {{multiply_pairs<M + 1, 4>...}, {multiply_pairs<M + 1, 1>...}, multiply_pairs<1, 8>};
}

template <class T>
const Kernels<T>& kernels() {
  static constexpr Kernels<T> kLanes = by_lanes<T>(std::make_integer_sequence<int, kMostRows>{});
  return kLanes;
}
template <>
const Kernels<bf16>& kernels<bf16>() {
  static constexpr Kernels<bf16> kLanes = by_lanes<bf16>(std::make_integer_sequence<int, kMostRows>{});
  static constexpr Kernels<bf16> kPairs = by_pairs(std::make_integer_sequence<int, kMostRows>{});
  static const bool has_pairs = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
  return has_pairs ? kPairs : kLanes;
}

template <class T, class C>
void columns(const Gemm& a, int64_t begin, int64_t end) {
  const int64_t m = a.c_MN.dim(0), ld = a.c_MN.dim(1), k = a.a.data.dim(1);
  const Kernels<T>& by = kernels<T>();
  for (int64_t col = begin, cols = 0; col < end; col += cols) {
    cols = m == 1 && end - col >= 8 ? 8 : end - col >= 4 ? 4 : 1;
    for (int64_t row = 0; row < m; row += kMostRows) {
      const int64_t rows = std::min<int64_t>(kMostRows, m - row);
      float sums[kMostRows * 8];
      const auto kernel = cols == 8 ? by.eight_of_one_row : (cols == 4 ? by.four : by.one)[rows - 1];
      kernel(sums, a.a.data.ptr<T>() + row * k, a.b.data.ptr<T>() + col * k, k);
      for (int64_t i = 0; i < rows; ++i) {
        C* c = a.c_MN.ptr<C>() + (row + i) * ld + col;
        for (int64_t j = 0; j < cols; ++j)
          c[j] = from_f32<C>(sums[i * cols + j] + (a.accumulate ? to_f32(c[j]) : 0.0f));
      }
    }
  }
}

}  // namespace

bool has_few_rows(const Gemm& a) {
  return a.c_MN.dim(0) <= kFewRows && a.trans_b && !a.trans_a && a.a.is_plain() && a.b.is_plain();
}

void few_rows_gemm(Stream& s, const Gemm& a) {
  const int64_t n = a.c_MN.dim(1), row_bytes = a.b.data.dim(1) * size_of(a.b.data.dtype);
  const int64_t cols = std::max<int64_t>(8, kTaskBytes / std::max<int64_t>(1, row_bytes) / 8 * 8);
  s.pool().run(div_ceil(n, cols), [&](int64_t task, int) {
    const int64_t begin = task * cols, end = std::min(n, begin + cols);
    with_float_type(a.a.data.dtype, [&]<class T>(T) {
      with_float_type(a.c_MN.dtype, [&]<class C>(C) { columns<T, C>(a, begin, end); });
    });
  });
}

}  // namespace moebius::cpu
