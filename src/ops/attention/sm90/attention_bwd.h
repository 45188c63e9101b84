// The backward pass of attention for sm_90a, in kernels one after the other: sums of each row, dk
// and dv, dq. Every sum has one order and no atomics. dk and dv want all queries of some keys, dq
// all keys of some queries, so dq either computes the scores once more, or reads their gradients ds
// as the kernel of dk and dv left them in scratch (attention_slices.h).
#pragma once

#include <cuda_bf16.h>

#include <climits>

#include "device/cuda/cuda.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_slices.h"
#include "ops/attention/cuda/attention.h"
#include "ops/attention/sm90/attention.h"

namespace moebius::cuda {

// Per row and head, with heads first: log2 e times lse, and <do, o>.
struct RowSums {
  float *lse2, *delta;  // [batch, heads, rows]
};

// ds, rounded to bf16, of a slice (attention_slices.h). Each tile is as it is in shared memory (128
// bytes of queries a key, in the 128-byte swizzle). What no query of a tile sees is not written.
struct DsTiles {
  unsigned char* tiles = nullptr;                       // null: not kept
  int b = 0, kv_head = 0, sequences = 0, kv_heads = 0;  // the first, and how many
  int group = 1;                                        // query heads of a kv head
  int band = 0;                                         // key tiles of a query tile, at most
  int query_begin = 0, query_end = INT_MAX;             // query tiles
  int64_t skipped = 0, tiles_of_head = 0;               // tiles before query_begin; from there to query_end
  // The dk and dv so far of all keys of the slice, f32, or null: the slice has all queries. A block's
  // sums are in the order of its threads.
  float4* kv_sums = nullptr;
  // Blocks that share the keys of a query, and where each leaves its dq, f32 [parts, rows of the slice,
  // heads of the slice, width].
  int parts = 1;
  float* q_parts = nullptr;

  __device__ __forceinline__ bool has(int query_tile, int key_tile) const {
    return query_tile - band < key_tile && key_tile <= query_tile;
  }
  // REQUIRES: has it.
  __device__ __forceinline__ unsigned char* tile(int of_b, int of_h, int query_tile, int key_tile) const {
    const int64_t head = int64_t{of_b - b} * kv_heads * group + (of_h - kv_head * group);
    return tiles +
           (head * tiles_of_head + first_of(query_tile) - skipped + min(query_tile, band - 1) - query_tile + key_tile) *
               kDsTileBytes;
  }
  // Tiles of the query tiles before this one.
  __device__ __forceinline__ int64_t first_of(int query_tile) const {
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

// dk and dv of the slice of `ds`, whose tiles are filled unless it has none.
void sm90_dkv(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds);
// dq of the slice from the tiles of `ds`.
void sm90_dq_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds);
// dq of all, from scores computed anew.
void sm90_dq(Stream& s, const AttentionBwd& a, const RowSums& sums);

}  // namespace moebius::cuda
