// Loads swizzled tiles from shared memory (copy.h) to the registers of a warp.
#pragma once

#include "ops/sm80/copy.h"
#include "ops/sm80/mma.h"

namespace moebius::cuda::sm80 {

// Loads the fragments of a step of 16 of k, as mma.m16n8k16 takes them, from a tile in shared memory with kChunks
// chunks a row. along_k: the rows of the tile run along k. across_k: each row of the tile is one k.
template <int kChunks>
__device__ __forceinline__ void load_a_along_k(uint32_t (&a)[4], uint32_t tile, uint32_t row, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32;
  load_matrices<false>(a, tile + swizzled<kChunks>(row + lane % 16, 2 * step + lane / 16));
}
template <int kChunks>
__device__ __forceinline__ void load_a_across_k(uint32_t (&a)[4], uint32_t tile, uint32_t column, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32, k = 16 * step + lane % 8 + lane / 16 * 8;
  load_matrices<true>(a, tile + swizzled<kChunks>(k, column / 8 + lane / 8 % 2));
}
// Loads 16 columns of B: words 0 and 1 are of the first 8, words 2 and 3 of the others.
template <int kChunks>
__device__ __forceinline__ void load_b_along_k(uint32_t (&b)[4], uint32_t tile, uint32_t column, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32;
  load_matrices<false>(b, tile + swizzled<kChunks>(column + lane % 8 + lane / 16 * 8, 2 * step + lane / 8 % 2));
}
template <int kChunks>
__device__ __forceinline__ void load_b_across_k(uint32_t (&b)[4], uint32_t tile, uint32_t column, uint32_t step) {
  const uint32_t lane = threadIdx.x % 32;
  load_matrices<true>(b, tile + swizzled<kChunks>(16 * step + lane % 16, column / 8 + lane / 16));
}

}  // namespace moebius::cuda::sm80
