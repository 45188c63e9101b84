#include "ops/cpu/few_rows.h"

#include <immintrin.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "ops/cpu/few_rows_tiles.h"
#include "ops/cpu/lanes.h"
#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

constexpr int kMaxRows = 4, kSumsTogether = 16;  // rows of x in a kernel: more would need more registers
constexpr int64_t kRowsTogether = kMaxRows;
static_assert(kMaxFewRows <= kMaxTileRows);

// Operands of a kernel: row i of x has its step p at x + i * row_stride + p * step_stride.
template <class T>
struct Rows {
  const T* x;
  int64_t row_stride, step_stride;
  const T* w;
  int64_t k;
  const T* ahead;  // memory that a kernel prefetches while it computes: some cache lines in each step, in order
};

// Where a kernel writes: sum (i, j) at data[i * ld + j].
struct Tile {
  float* data;
  int64_t ld;
};

//   tile[i][j] = sum over k of x[i][k] w[j][k]
template <int M, int N, class T>
void multiply_lanes(Tile tile, const Rows<T>& a) {
  Lanes sum[M][N] = {};
  const T* x = a.x;
  int64_t p = 0;
  const auto step = [&](auto&& load) __attribute__((always_inline)) {
    Lanes row[N];
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) row[j] = load(a.w + j * a.k + p);
#pragma GCC unroll 8
    for (int i = 0; i < M; ++i) {
      const Lanes value = load(x + i * a.row_stride);
#pragma GCC unroll 8
      for (int j = 0; j < N; ++j) sum[i][j] = multiply_add(value, row[j], sum[i][j]);
    }
  };
  for (; p + kNumLanes <= a.k; p += kNumLanes, x += a.step_stride) step([](const T* at) { return load_lanes(at); });
  if (p < a.k) step([&](const T* at) { return load_lanes(at, a.k - p); });
  for (int i = 0; i < M; ++i)
    for (int j = 0; j < N; ++j) tile.data[i * tile.ld + j] = sum_lanes(sum[i][j]);
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

// Returns 32 elements, or those in `mask` and zeros.
template <bool kIsWhole>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline __m512bh load_pairs(const bf16* at,
                                                                                                       __mmask32 mask) {
  if constexpr (kIsWhole) return (__m512bh)_mm512_loadu_epi16(at);
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, at);
}

// Adds the products of 32 elements to each sum, by vdpbf16ps: a pair of products to each lane. A row of x is loaded
// where it is used, since 24 sums and 6 rows of W leave two registers.
template <bool kIsWhole, int M, int N>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16"), gnu::always_inline]] inline void add_pairs(
    __m512 (&sum)[M][N], const bf16* x, int64_t x_stride, const bf16* w, int64_t w_stride, __mmask32 mask) {
  __m512bh w_pairs[N];
#pragma GCC unroll 8
  for (int j = 0; j < N; ++j) w_pairs[j] = load_pairs<kIsWhole>(w + j * w_stride, mask);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) {
    const __m512bh x_pairs = load_pairs<kIsWhole>(x + i * x_stride, mask);
#pragma GCC unroll 8
    for (int j = 0; j < N; ++j) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], x_pairs, w_pairs[j]);
  }
}

// Stores the sums of columns [0, 4) or [4, 6), or all if there are at most 16. I is 0 to kSumsTogether - 1.
template <int M, int N, int kFirst, int... I>
[[gnu::target("avx512f"), gnu::always_inline]] inline void put_sums(Tile tile, const __m512 (&sum)[M][N],
                                                                    std::integer_sequence<int, I...>) {
  constexpr int kCols = M * N <= kSumsTogether ? N : std::min(4, N - kFirst);
  const Wide v[4][4] = {(Wide)sum[std::min(I / kCols, M - 1)][kFirst + I % kCols]...};
  float sums[kSumsTogether];
  sum_four_by_four(sums, v);
#pragma GCC unroll 8
  for (int i = 0; i < M; ++i) std::memcpy(tile.data + i * tile.ld + kFirst, sums + i * kCols, kCols * sizeof(float));
}

// g++ 12 stores all sums in every step unless the code after the steps names them by constants; and a masked load costs
// more than a whole one, so that only the last step has it.
template <int M, int N, int kLinesAhead>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void multiply_pairs(Tile tile, const Rows<bf16>& a) {
  constexpr int64_t kStep = 32;
  __m512 sum[M][N] = {};
  const bf16* x = a.x;
  int64_t p = 0;
  for (; p + kStep <= a.k; p += kStep, x += a.step_stride) {
#pragma GCC unroll 8
    for (int i = 0; i < kLinesAhead; ++i) _mm_prefetch(a.ahead + p * kLinesAhead + i * kStep, _MM_HINT_T1);
    add_pairs<true>(sum, x, a.row_stride, a.w + p, a.k, 0);
  }
  for (; p < a.k; p += kStep)  // at most once
    add_pairs<false>(sum, x, a.row_stride, a.w + p, a.k, (__mmask32{1} << (a.k - p)) - 1);
  constexpr auto kIndices = std::make_integer_sequence<int, kSumsTogether>{};
  put_sums<M, N, 0>(tile, sum, kIndices);
  if constexpr (M * N > kSumsTogether) put_sums<M, N, 4>(tile, sum, kIndices);
}

template <class T>
using Multiply = void (*)(Tile, const Rows<T>&);

// The kernels for 1 to kMaxRows rows of x, by the number of rows of W at once.
template <class T>
struct Kernels {
  int64_t step;  // elements of a row
  std::array<Multiply<T>, kMaxRows> four, one;
  std::array<Multiply<T>, 2> eight;  // more would need more registers than there are
  // Several groups share the prefetches: each has 2 lines per step.
  std::array<Multiply<T>, kMaxRows> four_of_groups;
  std::array<Multiply<T>, kMaxRows> six_of_groups;  // reads x less often; null without registers for it
};

template <class T, int... M>
constexpr Kernels<T> by_lanes(std::integer_sequence<int, M...>) {
  constexpr std::array<Multiply<T>, kMaxRows> kFour = {multiply_lanes<M + 1, 4, T>...};
  return {kNumLanes, kFour, {multiply_lanes<M + 1, 1, T>...}, {multiply_lanes<1, 8, T>, multiply_lanes<2, 8, T>},
          kFour,     {}};
}
template <int... M>
constexpr Kernels<bf16> by_pairs(std::integer_sequence<int, M...>) {
  return {32,
          {multiply_pairs<M + 1, 4, 4>...},
          {multiply_pairs<M + 1, 1, 1>...},
          {multiply_pairs<1, 8, 8>, multiply_pairs<2, 8, 8>},
          {multiply_pairs<M + 1, 4, 2>...},
          {multiply_pairs<M + 1, 6, 2>...}};
}

template <class T>
const Kernels<T>& kernels(FewRowsMath) {
  static constexpr Kernels<T> kLanes = by_lanes<T>(std::make_integer_sequence<int, kMaxRows>{});
  return kLanes;
}
template <>
const Kernels<bf16>& kernels<bf16>(FewRowsMath math) {
  static constexpr Kernels<bf16> kLanes = by_lanes<bf16>(std::make_integer_sequence<int, kMaxRows>{});
  static constexpr Kernels<bf16> kPairs = by_pairs(std::make_integer_sequence<int, kMaxRows>{});
  return math == FewRowsMath::pairs ? kPairs : kLanes;
}

// Elements of a packed row: whole steps.
int64_t packed_length(int64_t k, int64_t step) { return div_ceil(k, step) * step; }

// kStep: elements of a register, so that whole steps are copied by one instruction each.
template <int64_t kStep, class T>
void pack(T* to, const void* const* row, int64_t num_rows, int64_t k) {
  const int64_t whole = k / kStep * kStep;
  for (int64_t first = 0; first < num_rows; first += kRowsTogether) {
    const int64_t M = std::min(kRowsTogether, num_rows - first);
    const auto from = [&](int64_t i) { return static_cast<const T*>(row[first + i]); };
    for (int64_t p = 0; p < whole; p += kStep) {
      for (int64_t i = 0; i < M; ++i, to += kStep) std::memcpy(to, from(i) + p, kStep * sizeof(T));
    }
    for (int64_t i = 0; whole < k && i < M; ++i, to += kStep) {
      std::memcpy(to, from(i) + whole, (k - whole) * sizeof(T));
      std::memset(to + k - whole, 0, (kStep - (k - whole)) * sizeof(T));
    }
  }
}

// The rows [first, first + num) of x, a group.
template <class T>
Rows<T> group_of(const FewRows& x, int64_t first, int64_t num, int64_t step) {
  return {static_cast<const T*>(x.data) + first * packed_length(x.k, step), step, num * step, nullptr, x.k, nullptr};
}

int64_t step_of(DType dtype, FewRowsMath math) {
  if (math == FewRowsMath::tiles) return kTileDepth;
  int64_t step = 0;
  with_float_type(dtype, [&]<class T>(T) { step = kernels<T>(math).step; });
  return step;
}

}  // namespace

bool has_few_rows_math(FewRowsMath math, DType dtype) {
  static const bool has_pairs = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw");
  if (math == FewRowsMath::lanes) return true;
  return dtype == DType::bf16 && (math == FewRowsMath::pairs ? has_pairs : has_amx_bf16());
}

FewRowsMath best_few_rows_math(DType dtype) {
  for (const FewRowsMath math : {FewRowsMath::tiles, FewRowsMath::pairs})
    if (has_few_rows_math(math, dtype)) return math;
  return FewRowsMath::lanes;
}

int64_t packed_bytes(DType dtype, int64_t num_rows, int64_t k, FewRowsMath math) {
  return num_rows * packed_length(k, step_of(dtype, math)) * size_of(dtype);
}

FewRows pack_few_rows(DType dtype, void* to, const void* const* row, int64_t num_rows, int64_t k, FewRowsMath math) {
  MOEBIUS_ASSERT(num_rows <= kMaxFewRows);
  const bool of_lanes = step_of(dtype, math) == kNumLanes;
  if (math == FewRowsMath::tiles)
    pack_bf16_tiles(static_cast<bf16*>(to), row, num_rows, k);
  else
    with_float_type(dtype, [&]<class T>(T) {
      of_lanes ? pack<kNumLanes>(static_cast<T*>(to), row, num_rows, k)
               : pack<32>(static_cast<T*>(to), row, num_rows, k);
    });
  return {to, num_rows, k, math};
}

template <class T>
void multiply_few_rows(float* tile, int64_t ld, const FewRows& x, const T* w, int64_t n, int64_t num_after) {
  if constexpr (std::is_same_v<T, bf16>) {
    if (x.math == FewRowsMath::tiles)
      return multiply_bf16_tiles(tile, ld, {static_cast<const bf16*>(x.data), x.num_rows, x.k}, w, n, num_after);
  }
  const Kernels<T>& by = kernels<T>(x.math);
  const int64_t num_groups = div_ceil(x.num_rows, kRowsTogether);
  const bool are_many = num_groups >= 4;
  for (int64_t col = 0, cols = 0; col < n; col += cols) {
    const int64_t left = n - col, left_after = left + num_after;
    cols = x.num_rows <= 2 && left >= 8 ? 8 : left >= 4 ? 4 : 1;
    if (are_many && by.six_of_groups[0] && left >= 6 && left != 8) cols = 6;
    const auto& kernel = cols == 6         ? by.six_of_groups
                         : cols == 1       ? by.one
                         : num_groups == 1 ? by.four
                                           : by.four_of_groups;
    // Later columns, which are read from memory, are prefetched by the groups. Few groups prefetch the next ones in
    // equal parts. Many have more time: each prefetches two rows of W, and together they prefetch most of them twice.
    const bool in_pairs = are_many && cols > 1;
    const int64_t part = in_pairs ? 2 : div_ceil(cols, std::min<int64_t>(4, num_groups));
    const int64_t step = !in_pairs ? part : num_groups < 6 ? 2 : 1;
    for (int64_t group = 0; group < num_groups; ++group) {
      const int64_t first = group * kRowsTogether, num = std::min(kRowsTogether, x.num_rows - first);
      const int64_t ahead = (in_pairs ? 2 * cols : cols) + group * step;
      const bool has_part = ahead + part <= left_after && (in_pairs || (group + 1) * part <= cols);
      Rows<T> rows = group_of<T>(x, first, num, by.step);
      rows.w = w + col * x.k;
      rows.ahead = has_part ? rows.w + ahead * x.k : rows.w;
      (cols == 8 ? by.eight[num - 1] : kernel[num - 1])({tile + first * ld + col, ld}, rows);
    }
  }
}

template void multiply_few_rows(float*, int64_t, const FewRows&, const float*, int64_t, int64_t);
template void multiply_few_rows(float*, int64_t, const FewRows&, const bf16*, int64_t, int64_t);

}  // namespace moebius::cpu
