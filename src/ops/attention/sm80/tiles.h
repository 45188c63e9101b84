// Tiles of rows of a head in shared memory, and the products of a warp with them, of compute capability
// 8.0 and later. A tile has kWidth columns of bf16, zeros past the width of the head.
#pragma once

#include <cuda_bf16.h>

#include "ops/attention/cuda/attention_mask.h"
#include "ops/sm80/copy.h"
#include "ops/sm80/mma.h"
#include "ops/sm80/pairs.h"

namespace moebius::cuda::sm80 {

using Half = __nv_bfloat16;

// Rows of one head of one sequence in global memory. Chunks are 16 bytes, at multiples of 16.
struct HeadRows {
  const Half* rows;
  int64_t stride;
  int width;
  bool has_chunks;
};

// x [batch, rows, heads, width]
struct Operand {
  const Half* data;
  int heads, width;
  bool has_chunks;
  __device__ __forceinline__ HeadRows of(int64_t first_row, int h) const {
    const int64_t stride = int64_t{heads} * width;
    return {data + first_row * stride + int64_t{h} * width, stride, width, has_chunks};
  }
};

// The position of a lane in 16 x 16 elements that ldmatrix loads: the byte offset of its row, and the mask of the
// swizzle for its chunk.
struct Lane {
  uint32_t row_bytes, flip;
};

template <int kWidth>
struct HeadTile {
  static constexpr int kChunks = kWidth / 8, kRowBytes = kWidth * 2, kSteps = kWidth / 16;

  // Copies rows [row, row + num_rows) below end; the others are zeros. All threads of the block call it.
  static __device__ __forceinline__ void copy(uint32_t to, const HeadRows& x, int row, int end, int num_rows) {
    if (!x.has_chunks) return copy_elements(to, x, row, end, num_rows);
    constexpr int kLanes = kChunks % 8 == 0 ? 8 : 4;  // lanes of a row
    const int lane = threadIdx.x % kLanes;
    for (int r = threadIdx.x / kLanes; r < num_rows; r += blockDim.x / kLanes) {
      const Half* const from = x.rows + (row + r) * x.stride + 8 * lane;
#pragma unroll
      for (int j = 0; j < kChunks; j += kLanes) {
        const bool valid = row + r < end && 8 * (lane + j) < x.width;
        copy_16(to + swizzled<kChunks>(r, lane + j), valid ? from + 8 * j : x.rows, valid);
      }
    }
  }

  // Returns the lane for a left operand of 16 rows, or for a right operand whose k runs along its 16 rows.
  static __device__ __forceinline__ Lane left_lane() { return lane_of(threadIdx.x % 16, threadIdx.x % 32 / 16); }
  // Returns the lane for a right operand whose k runs across its 16 rows.
  static __device__ __forceinline__ Lane right_lane() {
    return lane_of(threadIdx.x % 32 / 16 * 8 + threadIdx.x % 8, threadIdx.x / 8 % 2);
  }
  // Returns the address of columns [16 step, 16 step + 16) of the 16 rows from `row`, a multiple of 16.
  static __device__ __forceinline__ uint32_t at(uint32_t tile, const Lane& lane, int row, int step) {
    return tile + row * kRowBytes + lane.row_bytes + ((32 * step) ^ lane.flip);
  }

 private:
  static __device__ __forceinline__ Lane lane_of(uint32_t row, uint32_t chunk) {
    const uint32_t in_row = swizzled<kChunks>(row, chunk) - row * kRowBytes;
    return {row * kRowBytes, in_row};
  }
  // Does the same for rows whose chunks are not at multiples of 16 bytes, with ordinary loads and stores.
  static __device__ __forceinline__ void copy_elements(uint32_t to, const HeadRows& x, int row, int end, int num_rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_rows * kChunks; i += blockDim.x) {
      const int r = i / kChunks, chunk = i % kChunks;
      const Half* const from = x.rows + (row + r) * x.stride + 8 * chunk;
      const int columns = row + r < end ? x.width - 8 * chunk : 0;
      uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const uint32_t low = 2 * w < columns ? __bfloat16_as_ushort(from[2 * w]) : 0,
                       high = 2 * w + 1 < columns ? __bfloat16_as_ushort(from[2 * w + 1]) : 0;
        words[w] = low | high << 16;
      }
      store_16(to + swizzled<kChunks>(r, chunk), words);
    }
  }
};

// The sums of a warp: [i][j] is the tile of 16 x 8 at row 16 i and column 8 j.
template <int kRows, int kColumns>
using Sums = float[kRows / 16][kColumns / 8][4];
// A left operand in registers, [i][step] as above.
template <int kRows, int kDepth>
using Words = uint32_t[kRows / 16][kDepth / 16][4];

template <int kRows, int kColumns>
__device__ __forceinline__ void clear(float (&sums)[kRows][kColumns][4]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[i][j][e] = 0;
    }
  }
}

// sums += the product of a step of left operands with 16 columns of a right one
template <int kM, int kN>
__device__ __forceinline__ void add_step(float (&sums)[kM][kN][4], const uint32_t (&left)[kM][4],
                                         const uint32_t (&right)[4], int pair) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
    multiply(sums[i][2 * pair], left[i], right[0], right[1]);
    multiply(sums[i][2 * pair + 1], left[i], right[2], right[3]);
  }
}

// The rows of a tile from `row` as left operand.
template <int kWidth, int kM>
struct LeftRows {
  uint32_t tile;
  int row;
  Lane lane = HeadTile<kWidth>::left_lane();

  __device__ __forceinline__ void load(uint32_t (&left)[kM][4], int step) const {
#pragma unroll
    for (int i = 0; i < kM; ++i) load_matrices<false>(left[i], HeadTile<kWidth>::at(tile, lane, row + 16 * i, step));
  }
};

// The same 16 rows in registers.
template <int kWidth>
struct HeldRows {
  uint32_t words[kWidth / 16][4];

  __device__ __forceinline__ explicit HeldRows(const LeftRows<kWidth, 1>& rows) {
#pragma unroll
    for (int step = 0; step < kWidth / 16; ++step)
      load_matrices<false>(words[step], HeadTile<kWidth>::at(rows.tile, rows.lane, rows.row, step));
  }
  __device__ __forceinline__ void load(uint32_t (&left)[1][4], int step) const {
#pragma unroll
    for (int e = 0; e < 4; ++e) left[0][e] = words[step][e];
  }
};

// sums = x y^T over the width
template <int kWidth, int kM, int kN, class LeftOperand>
__device__ __forceinline__ void multiply_rows(float (&sums)[kM][kN][4], const LeftOperand& x, uint32_t y,
                                              const Lane& right_lane) {
  clear(sums);
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    uint32_t left[kM][4];
    x.load(left, step);
#pragma unroll
    for (int pair = 0; pair < kN / 2; ++pair) {
      uint32_t right[4];
      load_matrices<false>(right, HeadTile<kWidth>::at(y, right_lane, 16 * pair, step));
      add_step(sums, left, right, pair);
    }
  }
}

// sums [., width] += weights [., 16 kSteps] y [16 kSteps, width]
template <int kWidth, int kM, int kSteps>
__device__ __forceinline__ void add_product(float (&sums)[kM][kWidth / 8][4], const uint32_t (&weights)[kM][kSteps][4],
                                            uint32_t y, const Lane& lane) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    uint32_t left[kM][4];
#pragma unroll
    for (int i = 0; i < kM; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) left[i][e] = weights[i][step][e];
    }
#pragma unroll
    for (int pair = 0; pair < kWidth / 16; ++pair) {
      uint32_t right[4];
      load_matrices<true>(right, HeadTile<kWidth>::at(y, lane, 16 * step, pair));
      add_step(sums, left, right, pair);
    }
  }
}

// Converts sums to a left operand, rounded to bf16.
template <int kM, int kN>
__device__ __forceinline__ void pack_words(uint32_t (&words)[kM][kN / 2][4], const float (&x)[kM][kN][4]) {
#pragma unroll
  for (int i = 0; i < kM; ++i) {
#pragma unroll
    for (int j = 0; j < kN; ++j) {
      words[i][j / 2][j % 2 * 2] = pack_pair(x[i][j][0], x[i][j][1]);
      words[i][j / 2][j % 2 * 2 + 1] = pack_pair(x[i][j][2], x[i][j][3]);
    }
  }
}

// The lane's first row and column in its warp's sums.
__device__ __forceinline__ int lane_row() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_col() { return threadIdx.x % 4 * 2; }

// The destination of a result, [batch, rows, heads, width]. Pairs are 4 bytes, at multiples of 4.
struct Result {
  Half* data;
  int heads, width;
  bool has_pairs;

  // Stores sums times factor to rows below end. row: the warp's first row, counted over all sequences.
  template <int kM, int kN>
  __device__ __forceinline__ void store(const float (&sums)[kM][kN][4], const float (&factor)[kM][2], int64_t row,
                                        int64_t end, int h) const {
#pragma unroll
    for (int i = 0; i < 2 * kM; ++i) {
      const int64_t r = row + lane_row() + 8 * i;
      if (r >= end) continue;
      Half* const to = data + (r * heads + h) * width;
#pragma unroll
      for (int j = 0; j < kN; ++j) {
        const int col = 8 * j + lane_col();
        const float low = sums[i / 2][j][i % 2 * 2] * factor[i / 2][i % 2],
                    high = sums[i / 2][j][i % 2 * 2 + 1] * factor[i / 2][i % 2];
        if (has_pairs) {
          if (col < width) *reinterpret_cast<uint32_t*>(to + col) = pack_pair(low, high);
        } else {
          if (col < width) to[col] = __float2bfloat16_rn(low);
          if (col + 1 < width) to[col + 1] = __float2bfloat16_rn(high);
        }
      }
    }
  }
};

// The keys that the rows of a warp's tile of scores attend to.
struct SeenKeys {
  int any_first, any_last;  // no row attends to keys outside of these
  int all_first, all_last;  // every row attends to all of these

  // The queries are [row, end). The documents of the first and of the last begin at these positions.
  static __device__ __forceinline__ SeenKeys of(const AttentionSizes& z, int row, int end, int first_doc_start,
                                                int last_doc_start) {
    return {static_cast<int>(first_key_of(z, first_doc_start, row)), static_cast<int>(last_key(z, end - 1)),
            static_cast<int>(first_key_of(z, last_doc_start, end - 1)), static_cast<int>(last_key(z, row))};
  }
  // The queries are [row, end) of sequence b.
  static __device__ __forceinline__ SeenKeys of(const AttentionSizes& z, int b, int row, int end) {
    if (row >= end) return {0, -1, 0, -1};
    const int32_t* const doc_start = z.doc_start ? z.doc_start + b * z.rows : nullptr;
    return of(z, row, end, doc_start ? doc_start[row] : 0, doc_start ? doc_start[end - 1] : 0);
  }
  __device__ __forceinline__ bool some(int key, int num) const { return key <= any_last && key + num > any_first; }
  __device__ __forceinline__ bool all(int key, int num) const { return key >= all_first && key + num - 1 <= all_last; }
};

}  // namespace moebius::cuda::sm80
