#include <immintrin.h>

#include <array>
#include <bit>
#include <utility>

#include "ops/cpu/lanes.h"
#include "ops/experts/cpu/panels.h"

namespace moebius::cpu {
namespace {

// The layout of an A panel: by strip, rows of 256 words; by word, 14 rows of each word.
struct ByStrip {
  static constexpr int64_t kRow = kStripStride, kWord = 1, kRun = kStripWords, kNextRun = kPanelRows * kStripStride;
};
struct ByWord {
  static constexpr int64_t kRow = 1, kWord = kPanelRows, kRun = int64_t{1} << 40, kNextRun = 0;
};

// Computes M x N sums of f32 words in vectors of type V: N of the 32 columns from b and tile on.
template <int M, int64_t N, class A, class V>
[[gnu::always_inline]] inline void multiply_f32(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words) {
  constexpr int64_t kWidth = sizeof(V) / sizeof(float), kNum = N / kWidth;
  V sum[M][kNum] = {};
  for (; num_words > 0; num_words -= A::kRun, a += A::kNextRun) {
    const uint32_t* x = a;
    for (const uint32_t* end = b + std::min(num_words, A::kRun) * kPanelCols; b < end; b += kPanelCols, x += A::kWord) {
      V columns[kNum];
#pragma GCC unroll 8
      for (int64_t j = 0; j < kNum; ++j) std::memcpy(&columns[j], b + j * kWidth, sizeof(V));  // into registers
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        const float scale = std::bit_cast<float>(x[i * A::kRow]);
#pragma GCC unroll 8
        for (int64_t j = 0; j < kNum; ++j) sum[i][j] += scale * columns[j];
      }
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) {
#pragma GCC unroll 8
    for (int64_t j = 0; j < kNum; ++j) std::memcpy(tile + i * kPanelCols + j * kWidth, &sum[i][j], sizeof(V));
  }
}

// A vector of AVX-512, whatever -march is.
using Wide = float __attribute__((vector_size(64)));
constexpr int64_t kWideLanes = sizeof(Wide) / sizeof(float);

using Multiply = void (*)(float*, const uint32_t*, const uint32_t*, int64_t);
using EveryHeight = std::make_integer_sequence<int, kPanelRows>;

// The portable kernel computes at most five rows by two registers at a time, so that the sums fit into 16 registers. 14
// rows are cut into 5, 5 and 4, so that there are at least eight sums, which keep two multipliers busy.
constexpr int kPortableRows = 5;
constexpr int64_t kPortableCols = std::min<int64_t>(2 * kNumLanes, kPanelCols);

template <int M, class A>
void multiply_lanes(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words) {
  for (int64_t j = 0; j < kPanelCols; j += kPortableCols)
    multiply_f32<M, kPortableCols, A, Lanes>(tile + j, a, b + j, num_words);
}
template <class A, int... M>
constexpr std::array<Multiply, sizeof...(M)> table_portable(std::integer_sequence<int, M...>) {
  return {multiply_lanes<M + 1, A>...};
}

template <class A>
void kernel_portable(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words, int64_t num_rows) {
  static constexpr auto kByHeight = table_portable<A>(std::make_integer_sequence<int, kPortableRows>{});
  for (int64_t i = 0, rows = 0; i < num_rows; i += rows) {
    const int64_t left = num_rows - i;
    rows = div_ceil(left, div_ceil(left, int64_t{kPortableRows}));  // evenly
    kByHeight[rows - 1](tile + i * kPanelCols, a + i * A::kRow, b, num_words);
  }
}

template <int M, class A>
[[gnu::target("avx512f")]] void multiply_avx512(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words) {
  multiply_f32<M, kPanelCols, A, Wide>(tile, a, b, num_words);
}

// Uses vdpbf16ps, which adds a pair of products to each f32 sum, the lower k first.
template <int M, class A>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void multiply_bf16(float* tile, const uint32_t* a,
                                                                           const uint32_t* b, int64_t num_words) {
  __m512 sum[M][2];
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) sum[i][0] = sum[i][1] = _mm512_setzero_ps();
  for (; num_words > 0; num_words -= A::kRun, a += A::kNextRun) {
    const uint32_t* x = a;
    for (const uint32_t* end = b + std::min(num_words, A::kRun) * kPanelCols; b < end; b += kPanelCols, x += A::kWord) {
      const __m512bh left = (__m512bh)_mm512_loadu_si512(b), right = (__m512bh)_mm512_loadu_si512(b + kWideLanes);
#pragma GCC unroll 14
      for (int i = 0; i < M; ++i) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(x[i * A::kRow]));
        sum[i][0] = _mm512_dpbf16_ps(sum[i][0], pair, left);
        sum[i][1] = _mm512_dpbf16_ps(sum[i][1], pair, right);
      }
    }
  }
#pragma GCC unroll 14
  for (int i = 0; i < M; ++i) {
    _mm512_storeu_ps(tile + i * kPanelCols, sum[i][0]);
    _mm512_storeu_ps(tile + i * kPanelCols + kWideLanes, sum[i][1]);
  }
}

template <class A, int... M>
constexpr std::array<Multiply, sizeof...(M)> table_avx512(std::integer_sequence<int, M...>) {
  return {multiply_avx512<M + 1, A>...};
}
template <class A, int... M>
constexpr std::array<Multiply, sizeof...(M)> table_bf16(std::integer_sequence<int, M...>) {
  return {multiply_bf16<M + 1, A>...};
}

template <class A>
void kernel_avx512(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words, int64_t num_rows) {
  static constexpr auto kByHeight = table_avx512<A>(EveryHeight{});
  kByHeight[num_rows - 1](tile, a, b, num_words);
}
template <class A>
void kernel_bf16(float* tile, const uint32_t* a, const uint32_t* b, int64_t num_words, int64_t num_rows) {
  static constexpr auto kByHeight = table_bf16<A>(EveryHeight{});
  kByHeight[num_rows - 1](tile, a, b, num_words);
}

}  // namespace

// vdpbf16ps does the work of two FMAs. AMD issues one a cycle, twice the rate of f32; Intel one
// each two cycles, half the rate of f32 (Emerald Rapids: 94 against 180 GFLOP/s), so there bf16 is
// widened while it is packed.
int panel_maths(DType dtype, PanelMath (&maths)[3]) {
  const bool wide = __builtin_cpu_supports("avx512f");
  const Words words = dtype == DType::bf16 ? Words::bf16_as_f32 : Words::f32;
  int n = 0;
  if (wide) maths[n++] = {words, kernel_avx512<ByStrip>, kernel_avx512<ByWord>};
  if (dtype == DType::bf16 && __builtin_cpu_supports("avx512bf16")) {
    maths[n++] = {Words::bf16_pairs, kernel_bf16<ByStrip>, kernel_bf16<ByWord>};
    if (!__builtin_cpu_is("intel")) std::swap(maths[0], maths[1]);
  }
  maths[n++] = {words, kernel_portable<ByStrip>, kernel_portable<ByWord>};
  return n;
}

}  // namespace moebius::cpu
