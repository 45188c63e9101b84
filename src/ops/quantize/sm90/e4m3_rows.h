// E4M3 with a scale for 128 elements, made from bf16 in registers: the arithmetic, and the rows that a warp
// of a product holds. The bytes and scales are those of quantize.
#pragma once

#include <cuda_runtime.h>

#include "core/quantized.h"
#include "ops/quantize/scales.h"

namespace moebius::cuda::sm90 {

__device__ __forceinline__ float low_element(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_element(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ uint32_t low_magnitude(uint32_t word) { return (word << 16) & 0x7fff0000u; }
__device__ __forceinline__ uint32_t high_magnitude(uint32_t word) { return word & 0x7fff0000u; }

__device__ __forceinline__ float e4m3_scale(uint32_t largest) {
  return power_of_two_scale(largest, top_exponent(DType::f8_e4m3));
}

// Rounded to nearest even, saturated; a NaN becomes 0x7f.
__device__ __forceinline__ uint32_t pack_e4m3(float x0, float x1, float x2, float x3) {
  uint16_t lo, hi;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x1), "f"(x0));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x3), "f"(x2));
  return lo | static_cast<uint32_t>(hi) << 16;
}
__device__ __forceinline__ uint32_t pack_words(uint32_t a, uint32_t b, float inverse) {
  return pack_e4m3(low_element(a) * inverse, high_element(a) * inverse, low_element(b) * inverse,
                   high_element(b) * inverse);
}

// A matrix with row_blocks that a kernel writes. Its width is a multiple of 128.
struct QuantisedRows {
  uint8_t* data;  // null: not wanted
  float* scales;
  int32_t blocks;  // of 128 columns in a row
};

// data of a row_blocks operand; an empty one is not wanted.
inline QuantisedRows quantised_rows(const Operand& q) {
  if (q.data.empty()) return {};
  return {static_cast<uint8_t*>(q.data.data), q.scales.ptr<float>(), static_cast<int32_t>(q.scales.dim(1))};
}

// Gives each lane of four the words that the others have for it: of[t] is for lane t, and becomes what
// lane t had for this one.
__device__ __forceinline__ void exchange_in_quad(uint32_t (&of)[4][2]) {
  const bool odd = threadIdx.x & 1u, high = threadIdx.x & 2u;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int t = 0; t < 4; t += 2) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, odd ? of[t][i] : of[t + 1][i], 1);
      (odd ? of[t][i] : of[t + 1][i]) = got;
    }
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const uint32_t got = __shfl_xor_sync(0xffffffffu, high ? of[t][i] : of[t + 2][i], 2);
      (high ? of[t][i] : of[t + 2][i]) = got;
    }
  }
}

// Stores 128 columns of 16 rows, by the whole warp. words[kFirst + 2 j + i] are columns 8 j + 2 (lane % 4) + {0, 1}
// of row 8 i + lane / 4, in bf16. Rows at and past num_rows are not stored. Nothing passes through shared
// memory, where the tensor cores read: the four lanes of a row exchange what they have.
template <int kFirst, int kNum>
__device__ __forceinline__ void store_e4m3(const QuantisedRows& to, int32_t first_row, int32_t num_rows, int32_t block,
                                           const uint32_t (&words)[kNum]) {
  static_assert(kFirst + 32 <= kNum);
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const auto word = [&](int j) { return words[kFirst + 2 * j + i]; };
    uint32_t m = 0;
#pragma unroll
    for (int j = 0; j < 16; ++j) m = max(m, max(low_magnitude(word(j)), high_magnitude(word(j))));
    m = max(m, __shfl_xor_sync(0xffffffffu, m, 1));
    m = max(m, __shfl_xor_sync(0xffffffffu, m, 2));
    const float scale = e4m3_scale(m), inverse = 1.0f / scale;
    uint32_t of[4][2];  // of[t]: the elements that lane t of the four stores, 4 pairs
#pragma unroll
    for (int t = 0; t < 4; ++t) {
#pragma unroll
      for (int k = 0; k < 2; ++k) of[t][k] = pack_words(word(4 * t + 2 * k), word(4 * t + 2 * k + 1), inverse);
    }
    exchange_in_quad(of);
    uint32_t out[8];  // columns 32 (lane % 4) + 4 n + {0, 1, 2, 3}
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const int from = n % 2 * 2, k = n / 4;
      out[n] = __byte_perm(of[from][k], of[from + 1][k], n / 2 % 2 ? 0x7632 : 0x5410);
    }
    const int32_t row = lane / 4 + 8 * i;
    if (row >= num_rows) continue;
    const int64_t at = static_cast<int64_t>(first_row + row) * to.blocks + block;
    if (lane % 4 == 0) to.scales[at] = scale;
    auto* data = reinterpret_cast<uint4*>(to.data + at * 128 + lane % 4 * 32);
    data[0] = {out[0], out[1], out[2], out[3]};
    data[1] = {out[4], out[5], out[6], out[7]};
  }
}

}  // namespace moebius::cuda::sm90
