// The backward pass of attention for sm_90a, in kernels one after the other: sums of each row, dk
// and dv, dq. Every sum has one order and no atomics. dk and dv want all queries of some keys, dq
// all keys of some queries, so dq either computes the scores once more, or reads their gradients ds
// as the kernel of dk and dv left them in scratch.
#pragma once

#include <cuda_bf16.h>

#include "device/cuda/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm90/attention.h"

namespace moebius::cuda {

// Per row and head, with heads first: log2 e times lse, and <do, o>.
struct RowSums {
  float *lse2, *delta;  // [batch, heads, rows]
};

// ds, rounded to bf16, of some sequences and kv heads: tiles of 64 keys x 64 queries, each as it
// is in shared memory (128 bytes of queries a key, in the 128-byte swizzle). Of a query head
// there are those at and below the diagonal, a window's only; what no query of a tile sees
// is not written.
constexpr int kDsEdge = 64, kDsTileBytes = kDsEdge * kDsEdge * 2;
struct DsTiles {
  unsigned char* tiles = nullptr;                       // null: not kept
  int b = 0, kv_head = 0, sequences = 0, kv_heads = 0;  // the first, and how many
  int group = 1;                                        // query heads of a kv head
  int band = 0;                                         // key tiles of a query tile, at most
  int64_t tiles_of_head = 0;

  __device__ __forceinline__ bool has(int query_tile, int key_tile) const {
    return query_tile - band < key_tile && key_tile <= query_tile;
  }
  // REQUIRES: has it.
  __device__ __forceinline__ unsigned char* tile(int of_b, int of_h, int query_tile, int key_tile) const {
    const int64_t head = int64_t{of_b - b} * kv_heads * group + (of_h - kv_head * group);
    return tiles + (head * tiles_of_head + first_of(query_tile) + min(query_tile, band - 1) - query_tile + key_tile) *
                       kDsTileBytes;
  }
  // Tiles of the query tiles before this one.
  __host__ __device__ __forceinline__ int64_t first_of(int query_tile) const {
    const int64_t rows = query_tile, rising = rows < band ? rows : band;
    return rising * (rising + 1) / 2 + (rows - rising) * band;
  }
};

struct BwdMaps {
  CUtensorMap q, dout, k, v;
};
inline BwdMaps bwd_maps(const AttentionBwd& a, uint32_t queries, uint32_t keys) {
  return {.q = rows_map(a.q_THd, a.batch, queries),
          .dout = rows_map(a.do_THd, a.batch, queries),
          .k = rows_map(a.k_TGd, a.batch, keys),
          .v = rows_map(a.v_TGd, a.batch, keys)};
}

// dk and dv of the sequences and kv heads of `ds`, whose tiles are filled unless it has none.
void sm90_dkv(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds);
// dq of them from the tiles of `ds`. Heads of 64 and of 128.
void sm90_dq_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds);
// dq of all, from scores computed anew.
void sm90_dq(Stream& s, const AttentionBwd& a, const RowSums& sums);

}  // namespace moebius::cuda
