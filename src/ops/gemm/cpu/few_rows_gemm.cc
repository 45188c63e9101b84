#include "ops/gemm/cpu/few_rows_gemm.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kTaskBytes = 256 << 10;  // of W: enough for a task, and few enough for many tasks
constexpr int kMostRows = 4;               // of x in a kernel: more meet in one set of the first cache
constexpr int kMostSums = 16;              // of a kernel

// Rows of W that are read later: a kernel asks for them while it computes.
template <class T>
struct Ahead {
  const T* begin;
  int64_t num_rows;
};

// Multiplies M rows of x with N rows of w, each of k elements. `sums` has room for kMostSums.
//   sums[i * N + j] = sum over k of x[i][k] w[j][k]
template <int M, int N, class T>
void multiply_lanes(float* sums, const T* x, const T* w, int64_t k, Ahead<T>) {
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

using Wide = float __attribute__((vector_size(64)));

// Adds the lanes of each register in the order of sum_lanes: halves, then halves of the sums.
//   sums[i * 4 + j] = the sum of v[i][j]
[[gnu::target("avx512f"), gnu::always_inline]] inline void sum_four_by_four(float* sums, const Wide (&v)[4][4]) {
  Wide column[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    Wide half[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const Wide a = v[2 * i][j], b = v[2 * i + 1][j];
      half[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
                __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    column[j] = __builtin_shufflevector(half[0], half[1], 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
                __builtin_shufflevector(half[0], half[1], 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  }
  Wide pair[2];
#pragma GCC unroll 2
  for (int j = 0; j < 2; ++j) {
    const Wide a = column[2 * j], b = column[2 * j + 1];
    pair[j] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
              __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
  }
  const Wide all =
      __builtin_shufflevector(pair[0], pair[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
      __builtin_shufflevector(pair[0], pair[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
  std::memcpy(sums, &all, sizeof all);
}

// The same by vdpbf16ps, which adds a pair of products to each lane.
template <int M, int N>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void multiply_pairs(float* sums, const bf16* x, const bf16* w,
                                                                            int64_t k, Ahead<bf16> ahead) {
  constexpr int64_t kStep = 32;
  __m512 sum[M][N];
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = _mm512_setzero_ps();
  const auto step = [&](int64_t p, __mmask32 mask)
      __attribute__((always_inline, target("avx512f,avx512bw,avx512vl,avx512bf16"))) {
    __m512bh row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = (__m512bh)_mm512_maskz_loadu_epi16(mask, w + j * k + p);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const __m512bh value = (__m512bh)_mm512_maskz_loadu_epi16(mask, x + i * k + p);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], value, row[j]);
    }
  };
  int64_t p = 0;
  for (; p + kStep <= k; p += kStep) {
    for (int64_t i = 0; i < ahead.num_rows; ++i)
      _mm_prefetch(ahead.begin + p * ahead.num_rows + i * kStep, _MM_HINT_T1);
    step(p, ~__mmask32{0});
  }
  if (p < k) step(p, (__mmask32{1} << (k - p)) - 1);
  Wide v[4][4];
#pragma GCC unroll 16
  for (int i = 0; i < kMostSums; ++i) {
    const int at = std::min(i, M * N - 1);
    v[i / 4][i % 4] = (Wide)sum[at / N][at % N];
  }
  sum_four_by_four(sums, v);
}

template <class T>
using Multiply = void (*)(float*, const T*, const T*, int64_t, Ahead<T>);

// The kernels for 1 to kMostRows rows of x, by the number of rows of W at once.
template <class T>
struct Kernels {
  std::array<Multiply<T>, kMostRows> four, one;
  std::array<Multiply<T>, 2> eight;  // more would need more registers than there are
};

template <class T, int... M>
constexpr Kernels<T> by_lanes(std::integer_sequence<int, M...>) {
  return {{multiply_lanes<M + 1, 4, T>...},
          {multiply_lanes<M + 1, 1, T>...},
          {multiply_lanes<1, 8, T>, multiply_lanes<2, 8, T>}};
}
template <int... M>
constexpr Kernels<bf16> by_pairs(std::integer_sequence<int, M...>) {
  return {{multiply_pairs<M + 1, 4>...}, {multiply_pairs<M + 1, 1>...}, {multiply_pairs<1, 8>, multiply_pairs<2, 8>}};
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

// c (+)= sums, both of `rows` rows of `cols` columns; those of c are ld apart.
template <class C>
void put_sums(C* c, int64_t ld, float* sums, int64_t rows, int64_t cols, bool add) {
  for (int64_t i = 0; add && i < rows; ++i)
    for (int64_t j = 0; j < cols; ++j) sums[i * cols + j] += to_f32(c[i * ld + j]);
  C rounded[kMostSums];
  for (int64_t i = 0; i < rows * cols; i += kNumLanes) store_lanes(rounded + i, load_lanes(sums + i));
  for (int64_t i = 0; i < rows; ++i) std::memcpy(c + i * ld, rounded + i * cols, cols * sizeof(C));
}

// The rows of W that a pass over these columns asks for: its part of those of the next ones.
template <class T>
Ahead<T> rows_ahead(const T* w, int64_t k, int64_t cols, int64_t num_passes, int64_t pass) {
  const int64_t part = div_ceil(cols, num_passes), first = std::min(cols, pass * part);
  return {w + (cols + first) * k, std::min(part, cols - first)};
}

template <class T, class C>
void columns(const Gemm& a, int64_t begin, int64_t end) {
  const int64_t m = a.c_MN.dim(0), n = a.c_MN.dim(1), k = a.a.data.dim(1), num_passes = div_ceil(m, int64_t{kMostRows});
  const Kernels<T>& by = kernels<T>();
  for (int64_t col = begin, cols = 0; col < end; col += cols) {
    cols = m <= 2 && end - col >= 8 ? 8 : end - col >= 4 ? 4 : 1;
    const T* w = a.b.data.ptr<T>() + col * k;
    for (int64_t pass = 0; pass < num_passes; ++pass) {
      const int64_t row = pass * kMostRows, rows = std::min<int64_t>(kMostRows, m - row);
      const auto kernel = cols == 8 ? by.eight[rows - 1] : (cols == 4 ? by.four : by.one)[rows - 1];
      const auto ahead = col + 2 * cols <= n ? rows_ahead(w, k, cols, num_passes, pass) : Ahead<T>{w, 0};
      float sums[kMostSums];
      kernel(sums, a.a.data.ptr<T>() + row * k, w, k, ahead);
      put_sums(a.c_MN.ptr<C>() + row * n + col, n, sums, rows, cols, a.accumulate);
    }
  }
}

}  // namespace

bool has_few_rows(const Gemm& a) {
  return a.few_rows && a.c_MN.dim(0) <= kFewRows && a.trans_b && !a.trans_a && a.a.is_plain() && a.b.is_plain();
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
