#include "ops/attention/cpu/single_query.h"

#include <immintrin.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "ops/attention/cpu/softmax_row.h"

namespace moebius::cpu {
namespace {

constexpr int64_t kKeys = 16;  // of a register of scores
constexpr int64_t kChunk = 8;  // elements of a key that are transposed together
constexpr int64_t kCols = 64;  // of the output that are summed together

using Halves = int16_t __attribute__((vector_size(64)));
using Words = int32_t __attribute__((vector_size(64)));
using Quads = int64_t __attribute__((vector_size(64)));
using Floats = float __attribute__((vector_size(64)));

// Two elements of bf16 in each lane.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] inline __m512bh pair_of(const bf16* x) {
  int32_t bits;
  std::memcpy(&bits, x, sizeof bits);
  return (__m512bh)_mm512_set1_epi32(bits);
}

[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] inline __m128i chunk_of(const bf16* x) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
}

// Transposes kChunk elements of kKeys keys: lane j of pairs[p] gets elements 2 p and 2 p + 1 of key j.
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] inline void transpose(__m512i (&pairs)[kChunk / 2],
                                                                              const bf16* const (&key)[kKeys],
                                                                              int64_t at) {
  __m512i part[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    part[r] = _mm512_maskz_broadcast_i32x4(0x000f, chunk_of(key[r] + at));
    part[r] = _mm512_mask_broadcast_i32x4(part[r], 0x00f0, chunk_of(key[4 + r] + at));
    part[r] = _mm512_mask_broadcast_i32x4(part[r], 0x0f00, chunk_of(key[8 + r] + at));
    part[r] = _mm512_mask_broadcast_i32x4(part[r], 0xf000, chunk_of(key[12 + r] + at));
  }
  Words low[2], high[2];
#pragma GCC unroll 2
  for (int i = 0; i < 2; ++i) {
    const Words even = (Words)part[2 * i], odd = (Words)part[2 * i + 1];
    low[i] = __builtin_shufflevector(even, odd, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29);
    high[i] = __builtin_shufflevector(even, odd, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
  }
  const auto join = [](Words a, Words b, __m512i & first, __m512i & second) __attribute__((always_inline)) {
    const Quads x = (Quads)a, y = (Quads)b;
    first = (__m512i)__builtin_shufflevector(x, y, 0, 8, 2, 10, 4, 12, 6, 14);
    second = (__m512i)__builtin_shufflevector(x, y, 1, 9, 3, 11, 5, 13, 7, 15);
  };
  join(low[0], low[1], pairs[0], pairs[1]);
  join(high[0], high[1], pairs[2], pairs[3]);
}

// scores[h][j] = sum over the width of q[h][.] k[first + j][.], for n keys. Writes whole registers.
template <int H>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void put_scores(const SingleQuery& a, int64_t first, int64_t n,
                                                                        float* scores) {
  for (int64_t begin = 0; begin < n; begin += kKeys) {
    const bf16* key[kKeys];
    for (int64_t j = 0; j < kKeys; ++j) {
      const int64_t row = first + std::min(begin + j, n - 1);
      key[j] = a.k + row * a.row_stride;
      // The next head's keys follow in the row; the last head's are those of later rows.
      const bf16* ahead = a.prefetches_next_head ? key[j] + a.width : key[j] + kKeys * a.row_stride;
      for (int64_t c = 0; c < a.width; c += 32) _mm_prefetch(ahead + c, _MM_HINT_T1);
    }
    __m512 sum[H] = {};
    for (int64_t at = 0; at < a.width; at += kChunk) {
      __m512i pairs[kChunk / 2];
      transpose(pairs, key, at);
#pragma GCC unroll 4
      for (int p = 0; p < kChunk / 2; ++p)
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h)
          sum[h] = _mm512_dpbf16_ps(sum[h], pair_of(a.q + h * a.width + at + 2 * p), (__m512bh)pairs[p]);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) _mm512_storeu_ps(scores + h * SingleQueryArrays::kRow + begin, sum[h]);
  }
}

// out[h][c] += sum over keys j in [first, last) of probabilities[h][j] v[j][c]. first is even in its tile.
template <int H>
[[gnu::target("avx512f,avx512bw,avx512vl,avx512bf16")]] void add_values(const SingleQuery& a, const bf16* v,
                                                                        int64_t first, int64_t last,
                                                                        const bf16* probabilities, float* out) {
  for (int64_t col = 0; col < a.width; col += kCols) {
    const int64_t left = std::min(kCols, a.width - col);
    const __mmask32 mask[2] = {left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1,
                               left >= 64   ? ~__mmask32{0}
                               : left <= 32 ? 0
                                            : (__mmask32{1} << (left - 32)) - 1};
    __m512 sum[H][4] = {};
    for (int64_t j = first; j < last; j += 2) {
      const bf16* row = v + j * a.row_stride + col;
      const bf16* ahead = a.prefetches_next_head ? row + a.width : row + kKeys * a.row_stride;
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        _mm_prefetch(ahead + i * 32, _MM_HINT_T1);
        _mm_prefetch(ahead + i * 32 + a.row_stride, _MM_HINT_T1);
        const Halves even = (Halves)_mm512_maskz_loadu_epi16(mask[i], row + i * 32);
        const Halves odd =
            j + 1 < last ? (Halves)_mm512_maskz_loadu_epi16(mask[i], row + i * 32 + a.row_stride) : Halves{};
        const auto low =
            (__m512bh)__builtin_shufflevector(even, odd, 0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43, 16,
                                              48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59);
        const auto high =
            (__m512bh)__builtin_shufflevector(even, odd, 4, 36, 5, 37, 6, 38, 7, 39, 12, 44, 13, 45, 14, 46, 15, 47, 20,
                                              52, 21, 53, 22, 54, 23, 55, 28, 60, 29, 61, 30, 62, 31, 63);
#pragma GCC unroll 4
        for (int h = 0; h < H; ++h) {
          const __m512bh p = pair_of(probabilities + h * SingleQueryArrays::kRow + j);
          sum[h][2 * i] = _mm512_dpbf16_ps(sum[h][2 * i], p, low);
          sum[h][2 * i + 1] = _mm512_dpbf16_ps(sum[h][2 * i + 1], p, high);
        }
      }
    }
    // Each 128 bits of `low` have columns 0 to 3 of 8, and those of `high` the rest.
#pragma GCC unroll 4
    for (int h = 0; h < H; ++h) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        float* const to = out + h * a.width + col + i * 32;
        const __mmask16 m[2] = {static_cast<__mmask16>(mask[i]), static_cast<__mmask16>(mask[i] >> 16)};
        const Floats low = (Floats)sum[h][2 * i], high = (Floats)sum[h][2 * i + 1];
        const __m512 ordered[2] = {
            (__m512)__builtin_shufflevector(low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23),
            (__m512)__builtin_shufflevector(low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)};
#pragma GCC unroll 2
        for (int part = 0; part < 2; ++part)
          _mm512_mask_storeu_ps(to + part * 16, m[part],
                                _mm512_add_ps(ordered[part], _mm512_maskz_loadu_ps(m[part], to + part * 16)));
      }
    }
  }
}

template <int H>
void attend(const SingleQuery& a, const SingleQueryArrays& arrays) {
  float max[H], sum[H] = {};
  std::fill(max, max + H, -std::numeric_limits<float>::infinity());
  std::fill(arrays.out, arrays.out + H * a.width, 0.0f);
  for_key_tiles(a.keys, [&](Range tile) {
    const int64_t first = std::max(tile.begin, a.keys.begin) / 2 * 2, num_keys = tile.size();  // of whole pairs
    const Range seen{std::max(tile.begin, a.keys.begin) - tile.begin, num_keys};
    put_scores<H>(a, first, tile.end - first, arrays.scores + (first - tile.begin));
    for (int h = 0; h < H; ++h) {
      bf16* const probabilities = arrays.probabilities + h * SingleQueryArrays::kRow;
      softmax_row(probabilities, arrays.scores + h * SingleQueryArrays::kRow, seen, num_keys, a.scale, max[h], sum[h],
                  arrays.out + h * a.width, a.width);
      probabilities[num_keys] = bf16{};  // of the pair at the end
    }
    add_values<H>(a, a.v + tile.begin * a.row_stride, first - tile.begin, num_keys, arrays.probabilities, arrays.out);
  });
  for (int h = 0; h < H; ++h) {
    const float inverse = 1.0f / sum[h];
#pragma omp simd
    for (int64_t c = 0; c < a.width; ++c) a.o[h * a.width + c] = to_bf16(arrays.out[h * a.width + c] * inverse);
    a.lse[h] = max[h] + std::log(sum[h]);
  }
}

}  // namespace

bool has_single_query(int64_t width) {
  static const bool has_pairs =
      __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  return has_pairs && width % kChunk == 0;
}

void single_query_fwd(const SingleQuery& a, const SingleQueryArrays& arrays) {
  using Attend = void (*)(const SingleQuery&, const SingleQueryArrays&);
  constexpr Attend kAttend[kHeadsTogether] = {attend<1>, attend<2>, attend<3>, attend<4>};
  kAttend[a.num_heads - 1](a, arrays);
}

}  // namespace moebius::cpu
