// The parts that the kernels for sums over queries share: those of dk and dv in attention_dkv.cu, and of dv, ds and
// dk in attention_dv_ds.cu. Their blocks have 128 keys of one kv head of one sequence.
#pragma once

#include <algorithm>

#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {

constexpr int kConsumers = 2 * kGroupThreads, kDkvKeys = 128;
constexpr int kDsWarpBytes = kDsTileBytes / 4;

// The query head of the group and the row that a step works on. Heads and rows come in order.
struct DkvWalk {
  int first_row, end_row, rows_of_step, steps;
  int row = first_row, head = 0;
  __device__ void next() {
    row += rows_of_step;
    if (row >= end_row) row = first_row, ++head;
  }
};

// Returns the end of the rows that a block walks. Where ds is kept, whole tiles of it are written: what queries past
// the end see is zero.
template <bool kKeepsDs>
__device__ __forceinline__ int64_t rows_end_of(const AttentionSizes& z, const DsTiles& ds, int b, int first_row,
                                               int key) {
  const int64_t key_end = key + kDkvKeys < z.kv_rows ? key + kDkvKeys : z.kv_rows;
  const int64_t rows_end = seen_end(z, b, first_row, key_end);
  if constexpr (!kKeepsDs) return rows_end;
  const int64_t tile_end = (rows_end + kDsEdge - 1) / kDsEdge, slice_end = ds.query_end;
  return (tile_end < slice_end ? tile_end : slice_end) * kDsEdge;
}

// The place of a block that writes or reads tiles of ds, and the first query of the slice that sees one of its keys.
struct DsBlock {
  int kv_head, b, key, first_row;
};
__device__ __forceinline__ DsBlock ds_block(const DsTiles& ds) {
  const int key = blockIdx.z * kDkvKeys;  // the longest first
  return {.kv_head = static_cast<int>(ds.kv_head + blockIdx.x),
          .b = static_cast<int>(ds.b + blockIdx.y),
          .key = key,
          .first_row = max(key, ds.query_begin * static_cast<int>(kDsEdge))};
}

// Returns the walk of a block, whose steps have 64 queries. All threads call it: the first warp finds the end of the
// walk, and its first thread calls init_barriers().
template <class Init>
__device__ __forceinline__ DkvWalk begin_walk(int& rows_end, const AttentionSizes& z, const DsTiles& ds,
                                              const DsBlock& block, Init&& init_barriers) {
  if (threadIdx.x < 32) {
    const int64_t end = rows_end_of<true>(z, ds, block.b, block.first_row, block.key);
    if (threadIdx.x == 0) {
      rows_end = static_cast<int>(end);
      init_barriers();
      fence_mbarrier_init();
    }
  }
  __syncthreads();
  const int edge = kDsEdge, rows = max(0, rows_end - block.first_row);
  return {.first_row = block.first_row,
          .end_row = rows_end,
          .rows_of_step = edge,
          .steps = (rows + edge - 1) / edge * (z.heads / z.kv_heads)};
}

// Stores a warp's 16 keys of a tile of ds, [keys, queries] in the order of its accumulators. With 32 queries a step, it
// stores after the second half of the tile. The wait for the store before takes no time: a step is longer than a copy.
template <int kWords>
__device__ __forceinline__ void keep_ds(unsigned char* tile, unsigned char* place, const uint32_t (&words)[kWords],
                                        int half) {
  constexpr bool kHalves = kWords == 8;
  static_assert(kHalves || kWords == 16);
  const uint32_t lane = threadIdx.x % 32, at = smem_addr(place);
  if (!kHalves || half == 0) {
    if (lane == 0) tma_wait_read<0>();
    __syncwarp();
  }
#pragma unroll
  for (uint32_t j = 0; j < kWords / 4; ++j) {
    const uint32_t chunk = (kHalves ? 4 * half : 0) + 2 * j + lane / 16;
    stmatrix_4(at + swizzle_128(lane % 16, chunk), words[4 * j], words[4 * j + 1], words[4 * j + 2], words[4 * j + 3]);
  }
  if (kHalves && half == 0) return;
  fence_proxy_async();
  __syncwarp();
  if (lane != 0) return;
  bulk_store(tile + threadIdx.x / 32 % 4 * kDsWarpBytes, at, kDsWarpBytes);
  tma_commit();
}

// Returns the place of a thread's sums in DsTiles::kv_sums. widths: those of dk and dv together.
__device__ __forceinline__ float4* kv_sums_of(const DsTiles& ds, int kv_head, int key, int widths) {
  const int64_t block = int64_t{key / kDkvKeys} * ds.kv_heads + kv_head - ds.kv_head;
  const int group = threadIdx.x / kGroupThreads - 1;
  return ds.kv_sums + ((2 * block + group) * (widths / 8) * kGroupThreads + threadIdx.x % kGroupThreads);
}

// sums += those that earlier slices left, if any. Where later ones follow, the sums go back to `at`.
template <int kNum>
__device__ __forceinline__ void through_memory(float (&sums)[kNum], float4* at, bool has_earlier, bool has_later) {
#pragma unroll
  for (int i = 0; i < kNum / 4; ++i) {
    float4* const mine = at + i * kGroupThreads;
    if (has_earlier) {
      const float4 x = *mine;
      sums[4 * i] += x.x, sums[4 * i + 1] += x.y, sums[4 * i + 2] += x.z, sums[4 * i + 3] += x.w;
    }
    if (has_later) *mine = {sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]};
  }
}

// Returns the blocks of a slice: kv heads, sequences, and keys that its queries may see.
inline dim3 dkv_blocks(const AttentionSizes& z, const DsTiles& ds) {
  const int64_t keys = ds.kv_sums ? std::min(z.kv_rows, ds.query_end * kDsEdge) : z.kv_rows;
  return dim3(ds.kv_heads, ds.sequences, static_cast<unsigned>(div_ceil(keys, kDkvKeys)));
}

}  // namespace moebius::cuda
