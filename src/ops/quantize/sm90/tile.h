// A tile of 128 x 128 of bf16, quantised to E4M3 or E5M2: the parts that the kernels of sm_90 share. Device code only.
//
// A tile is read and written row by row, 16 bytes of a row by a lane and so a row by 16 lanes. Its columns
// become rows of a transposed operand by way of shared memory.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/quantized.h"
#include "ops/quantize/scales.h"

namespace moebius::cuda::sm90 {

inline constexpr int kQuantizeTile = 128;
inline constexpr int kTileLanes = 16;  // lanes that share a row
inline constexpr int kTilePitch =
    kQuantizeTile / 2 + 4;  // words of a row in shared memory: chunks of 16 bytes stay aligned
inline constexpr int kTileWords = kQuantizeTile * kTilePitch;
static_assert(kGroupAlign == kQuantizeTile && kTileLanes * 8 == kQuantizeTile);

__device__ __forceinline__ float low_element(uint32_t word) { return __uint_as_float(word << 16); }
__device__ __forceinline__ float high_element(uint32_t word) { return __uint_as_float(word & 0xffff0000u); }
__device__ __forceinline__ uint32_t low_magnitude(uint32_t word) { return (word << 16) & 0x7fff0000u; }
__device__ __forceinline__ uint32_t high_magnitude(uint32_t word) { return word & 0x7fff0000u; }

__device__ __forceinline__ uint32_t largest_of(const uint4& v) {
  uint32_t m = 0;
  for (const uint32_t word : {v.x, v.y, v.z, v.w}) m = max(m, max(low_magnitude(word), high_magnitude(word)));
  return m;
}
// The largest of the lanes that share a row.
__device__ __forceinline__ uint32_t largest_of_row(uint32_t m) {
#pragma unroll
  for (int step = 1; step < kTileLanes; step *= 2) m = max(m, __shfl_xor_sync(~0u, m, step));
  return m;
}

// The scale of a block by its largest magnitude, and its inverse. Both are powers of two, or NaN.
struct TileScale {
  float scale, inverse;
};
template <DType kElement = DType::f8_e4m3>
__device__ __forceinline__ TileScale tile_scale(uint32_t largest) {
  const float scale = power_of_two_scale(largest, top_exponent(kElement));
  // 2^n has the bits (n + 127) << 23; that of 2^-127 is a subnormal number, whose inverse has 254.
  const uint32_t bits = __float_as_uint(scale);
  return {scale, scale != scale ? scale : __uint_as_float((254u << 23) - (bits & 0x7f800000u))};
}

// Rounded to nearest even, saturated; a NaN becomes 0x7f.
template <DType kElement = DType::f8_e4m3>
__device__ __forceinline__ uint32_t pack_f8(float x0, float x1, float x2, float x3) {
  static_assert(kElement == DType::f8_e4m3 || kElement == DType::f8_e5m2);
  uint16_t lo, hi;
  if constexpr (kElement == DType::f8_e4m3) {
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x1), "f"(x0));
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x3), "f"(x2));
  } else {
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(lo) : "f"(x1), "f"(x0));
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(hi) : "f"(x3), "f"(x2));
  }
  return lo | static_cast<uint32_t>(hi) << 16;
}
template <DType kElement = DType::f8_e4m3>
__device__ __forceinline__ uint32_t pack_words(uint32_t a, uint32_t b, float inverse) {
  return pack_f8<kElement>(low_element(a) * inverse, high_element(a) * inverse, low_element(b) * inverse,
                           high_element(b) * inverse);
}
// 8 elements of a row.
template <DType kElement = DType::f8_e4m3>
__device__ __forceinline__ uint2 pack_chunk(const uint4& v, float inverse) {
  return {pack_words<kElement>(v.x, v.y, inverse), pack_words<kElement>(v.z, v.w, inverse)};
}

// The expert whose columns of the transposed layout hold `at`, a multiple of 128: the last one that begins there or
// before (core/quantized.h, group_begin). By whole warps.
__device__ __forceinline__ int group_of_columns(const int32_t* offsets, int num_groups, int64_t at) {
  int begun = 0;
  for (int first = 0; first < num_groups; first += 32) {
    const int group = first + static_cast<int>(threadIdx.x % 32);
    const bool begins = group < num_groups && group_begin(offsets[group], group) <= at;
    begun += __popc(__ballot_sync(~0u, begins));
  }
  return max(begun - 1, 0);
}

// A tile's place in a transposed operand.
struct TileColumns {
  uint8_t* data;       // elements of the matrix
  float* scales;       // null with kShared: they are stored elsewhere
  int64_t width;       // elements of a row of data
  int64_t scale_cols;  // elements of a row of scales
  int64_t row, block;  // the row of data of the first column of the tile, and its block of 128 along a row
  int cols;            // columns that the tile has
};

// Writes the columns of the tile in shared memory, whose rows have kTilePitch words, as rows of a transposed operand.
// kShared: all columns share the scale of the magnitude `shared`. By all kThreads threads of a block, once the tile is
// visible to them. It overwrites the tile.
template <int kThreads, bool kShared, DType kElement = DType::f8_e4m3>
__device__ void store_columns(uint32_t* tile, const TileColumns& to, uint32_t shared) {
  constexpr int kPairs = kQuantizeTile / 2, kSegments = kThreads / kPairs, kRows = kQuantizeTile / kSegments;
  constexpr int kChunks = kQuantizeTile / 16;
  static_assert(kRows % 16 == 0);
  __shared__ uint2 of_segments[kSegments][kPairs];
  const int pair = static_cast<int>(threadIdx.x) % kPairs, segment = static_cast<int>(threadIdx.x) / kPairs;
  uint32_t words[kRows];
  uint2 m{shared, shared};
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    words[r] = tile[(segment * kRows + r) * kTilePitch + pair];
    if constexpr (!kShared) m = {max(m.x, low_magnitude(words[r])), max(m.y, high_magnitude(words[r]))};
  }
  if constexpr (!kShared) of_segments[segment][pair] = m;
  __syncthreads();
  if constexpr (!kShared) {
#pragma unroll
    for (int s = 0; s < kSegments; ++s) m = {max(m.x, of_segments[s][pair].x), max(m.y, of_segments[s][pair].y)};
  }
  const TileScale scale[2] = {tile_scale<kElement>(m.x), tile_scale<kElement>(m.y)};
  if (segment == 0 && 2 * pair < to.cols) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (!kShared) to.scales[(to.row + 2 * pair + j) * to.scale_cols + to.block] = scale[j].scale;
      if (kShared && pair == 0 && to.scales)
        to.scales[to.row / kQuantizeTile * to.scale_cols + to.block] = scale[j].scale;
    }
  }
  // Through shared memory again, so that a row of data leaves in whole lines. A chunk is 16 bytes, and the
  // chunks of a row change places so that neighbouring pairs are in different banks.
  uint4* const rows = reinterpret_cast<uint4*>(tile);
  const auto place = [](int row, int chunk) { return row * kChunks + (chunk ^ row / 2 % kChunks); };
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const auto element = [&](int r) {
      return (j == 0 ? low_element(words[r]) : high_element(words[r])) * scale[j].inverse;
    };
#pragma unroll
    for (int i = 0; i < kRows; i += 16) {
      uint32_t out[4];
#pragma unroll
      for (int q = 0; q < 4; ++q)
        out[q] = pack_f8<kElement>(element(i + 4 * q), element(i + 4 * q + 1), element(i + 4 * q + 2),
                                   element(i + 4 * q + 3));
      rows[place(2 * pair + j, (segment * kRows + i) / 16)] = {out[0], out[1], out[2], out[3]};
    }
  }
  __syncthreads();
  const int64_t at = to.block * kQuantizeTile;
#pragma unroll
  for (int k = static_cast<int>(threadIdx.x); k < kQuantizeTile * kChunks; k += kThreads) {
    const int row = k / kChunks, chunk = k % kChunks;
    if (row >= to.cols || at + 16 * chunk >= to.width) continue;
    *reinterpret_cast<uint4*>(to.data + (to.row + row) * to.width + at + 16 * chunk) = rows[place(row, chunk)];
  }
}

}  // namespace moebius::cuda::sm90
