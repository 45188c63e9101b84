// The parts that the generic attention kernels share: tiles of rows in shared memory, in f32.
#pragma once

#include <cstdint>

#include "device/gpu_limits.h"
#include "ops/attention/cuda/attention_mask.h"

namespace moebius::cuda {

constexpr int kSide = 16, kThreads = kSide * kSide;  // a block is kSide x kSide threads

// kRows rows and keys at a time; a row of shared memory has kChunks * 64 columns, zero past the
// width, and 4 more, so that the 16 rows that a quarter of a warp reads are in different banks.
template <int kRows_, int kChunks_>
struct TileShape {
  static constexpr int kRows = kRows_, kChunks = kChunks_, kPitch = kChunks * 64 + 4, kFloats = kRows * kPitch;
  static constexpr int kPer = kRows / kSide;                                         // rows of a thread
  static constexpr int kScorePitch = kRows + 4, kScoreFloats = kRows * kScorePitch;  // of a tile of scores
};

// Calls launch<Tile>() with the tile for heads of this width: the larger one of two if it fits into the GPU's shared
// memory. bytes<Tile>(): what a block needs.
template <class Bytes, class Launch>
void with_fitting_tile(const Stream& s, int64_t width, Bytes bytes, Launch launch) {
  const auto choose = [&]<class Large, class Small>() {
    if (bytes.template operator()<Large>() <= gpu_limits(s).shared_bytes_per_block)
      launch.template operator()<Large>();
    else
      launch.template operator()<Small>();
  };
  if (width <= 64)
    choose.template operator()<TileShape<64, 1>, TileShape<32, 1>>();
  else if (width <= 128)
    choose.template operator()<TileShape<64, 2>, TileShape<32, 2>>();
  else
    choose.template operator()<TileShape<32, 4>, TileShape<16, 4>>();
}

// Rows [row, row + kRows) below `end` of head h of x [., heads, width]; the others are zeros.
template <class Tile>
__device__ void load_rows(float* to, const float* x, int64_t row, int64_t end, int heads, int h, int width) {
  const int64_t stride = int64_t{heads} * width;
  const auto* from = x + row * stride + int64_t{h} * width;
  constexpr int kCols = Tile::kChunks * 64;
  for (int i = threadIdx.x; i < Tile::kRows * kCols; i += kThreads) {
    const int r = i / kCols, c = i % kCols;
    to[r * Tile::kPitch + c] = row + r < end && c < width ? from[r * stride + c] : 0.0f;
  }
}

// sums[i][j] = <x row ty + 16 i, y row tx + 16 j>
template <class Tile>
__device__ void dot_rows(float (&sums)[Tile::kPer][Tile::kPer], const float* x, const float* y, int width, int ty,
                         int tx) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kPer; ++j) sums[i][j] = 0;
  }
#pragma unroll 4
  for (int c = 0; c < width; c += 4) {
    float4 u[Tile::kPer], v[Tile::kPer];
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      u[i] = *reinterpret_cast<const float4*>(x + (ty + kSide * i) * Tile::kPitch + c);
      v[i] = *reinterpret_cast<const float4*>(y + (tx + kSide * i) * Tile::kPitch + c);
    }
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
#pragma unroll
      for (int j = 0; j < Tile::kPer; ++j) {
        sums[i][j] += u[i].x * v[j].x;
        sums[i][j] += u[i].y * v[j].y;
        sums[i][j] += u[i].z * v[j].z;
        sums[i][j] += u[i].w * v[j].w;
      }
    }
  }
}

// The elements of a tile of results that a thread holds: rows ty + 16 i, columns 64 chunk + 4 tx
// and the next three.
template <class Tile>
using Sums = float[Tile::kPer][Tile::kChunks][4];

// sums += weights [rows, kRows] x [kRows, columns]
template <class Tile>
__device__ void add_weighted(Sums<Tile>& sums, const float* weights, const float* x, int ty, int tx) {
#pragma unroll 2
  for (int k = 0; k < Tile::kRows; k += 4) {
    float w[Tile::kPer][4];
#pragma unroll
    for (int i = 0; i < Tile::kPer; ++i) {
      const auto w4 = *reinterpret_cast<const float4*>(weights + (ty + kSide * i) * Tile::kScorePitch + k);
      w[i][0] = w4.x, w[i][1] = w4.y, w[i][2] = w4.z, w[i][3] = w4.w;
    }
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
#pragma unroll
      for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
        const auto v = *reinterpret_cast<const float4*>(x + (k + kk) * Tile::kPitch + chunk * 64 + tx * 4);
#pragma unroll
        for (int i = 0; i < Tile::kPer; ++i) {
          sums[i][chunk][0] += w[i][kk] * v.x;
          sums[i][chunk][1] += w[i][kk] * v.y;
          sums[i][chunk][2] += w[i][kk] * v.z;
          sums[i][chunk][3] += w[i][kk] * v.w;
        }
      }
    }
  }
}

// Stores a thread's rows of a tile, times factor[i].
template <class Tile>
__device__ void store_rows(float* x, const Sums<Tile>& sums, const float (&factor)[Tile::kPer], int64_t row,
                           int64_t end, int heads, int h, int width, int ty, int tx) {
#pragma unroll
  for (int i = 0; i < Tile::kPer; ++i) {
    const int64_t r = row + ty + kSide * i;
    if (r >= end) continue;
    auto* to = x + (r * heads + h) * width;
#pragma unroll
    for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int c = chunk * 64 + tx * 4 + e;
        if (c < width) to[c] = sums[i][chunk][e] * factor[i];
      }
    }
  }
}

}  // namespace moebius::cuda
