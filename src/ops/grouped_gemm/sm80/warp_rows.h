// The sums of a warp as rows of bf16: a lane gets chunks of eight consecutive columns, which it writes with one store
// of 16 bytes.
#pragma once

#include "ops/grouped_gemm/sm80/kernel.h"
#include "ops/sm80/pairs.h"

namespace moebius::cuda::sm80 {

// The lanes of a quad exchange words: word i of lane q becomes word q of lane i.
__device__ __forceinline__ void transpose_quad(uint32_t (&word)[4]) {
#pragma unroll
  for (int distance = 1; distance <= 2; distance *= 2) {
    const bool upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if ((i & distance) != 0) continue;
      const uint32_t got = __shfl_xor_sync(0xffffffffu, upper ? word[i] : word[i + distance], distance);
      if (upper)
        word[i] = got;
      else
        word[i + distance] = got;
    }
  }
}

constexpr int kRowsOfLane = 8;
// Returns the i-th row of this lane within the 64 of its warp.
__device__ __forceinline__ int32_t row_of_lane(int i) {
  return 16 * (i / 2) + 8 * (i % 2) + static_cast<int32_t>(threadIdx.x % 32 / 4);
}
// Returns the first of this lane's eight columns within each 32 of its warp's 64.
__device__ __forceinline__ int32_t col_of_lane() { return static_cast<int32_t>(threadIdx.x % 4 * 8); }

// Row i of the lane: word j of low is columns 2 j and 2 j + 1 of its eight, in the first 32 of the warp's
// columns; high is in the others.
struct RowChunks {
  uint32_t low[4], high[4];
};
__device__ __forceinline__ RowChunks row_chunks(const WarpSums& sums, int i) {
  RowChunks row;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const auto& low = sums[i / 2][j];
    const auto& high = sums[i / 2][j + 4];
    row.low[j] = pack_pair(low[i % 2 * 2], low[i % 2 * 2 + 1]);
    row.high[j] = pack_pair(high[i % 2 * 2], high[i % 2 * 2 + 1]);
  }
  transpose_quad(row.low);
  transpose_quad(row.high);
  return row;
}

__device__ __forceinline__ void store_chunk(uint16_t* to, const uint32_t (&word)[4]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(word[0], word[1], word[2], word[3]);
}

// Stores the first n of eight columns, at any address.
__device__ __forceinline__ void store_elements(uint16_t* to, const uint32_t (&word)[4], int32_t n) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    if (j < n) to[j] = static_cast<uint16_t>(word[j / 2] >> (j % 2 * 16));
  }
}
// Stores eight columns that are a chunk, or the first n of them if not kInChunks.
template <bool kInChunks>
__device__ __forceinline__ void store_columns(uint16_t* to, const uint32_t (&word)[4], int32_t n) {
  if constexpr (kInChunks)
    store_chunk(to, word);
  else
    store_elements(to, word, n);
}

// Columns [first, first + C) of a bias for each expert; null: none.
struct ColumnBias {
  const uint16_t* b;
  int32_t first, C;
  __device__ __forceinline__ float at(int32_t expert, int32_t col) const {
    const bool there = col >= first && col < first + C;
    return there ? __uint_as_float(uint32_t{b[int64_t{expert} * C + col - first]} << 16) : 0.0f;
  }
};

// The sums begin at the bias of their column: column_of(j) is that of the even columns of tiles j.
template <class ColumnOf>
__device__ __forceinline__ void begin_sums(WarpSums& sums, const ColumnBias& bias, int32_t expert, ColumnOf column_of) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    float even = 0, odd = 0;
    if (bias.b != nullptr) {
      even = bias.at(expert, column_of(j));
      odd = bias.at(expert, column_of(j) + 1);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      sums[i][j][0] = sums[i][j][2] = even;
      sums[i][j][1] = sums[i][j][3] = odd;
    }
  }
}
__device__ __forceinline__ void clear_sums(WarpSums& sums) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[i][j][0] = sums[i][j][1] = sums[i][j][2] = sums[i][j][3] = 0;
  }
}

}  // namespace moebius::cuda::sm80
