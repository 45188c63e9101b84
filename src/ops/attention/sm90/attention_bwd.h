// The backward pass of attention for sm_90a, in kernels one after the other: sums of each row first,
// then dq, dk and dv. Every sum has one order.
//
// For most shapes one kernel computes all three (attention_fused_bwd.cu). For the others (bwd_path() in
// attention_slices.h) one kernel computes dk and dv, which need all queries of some keys, and the next
// one dq, which needs all keys of some queries. The latter either recomputes the scores, or
// reads their gradients ds, which the kernel of dk and dv stored in scratch. With heads of 256 registers do not hold
// the sums of both dk and dv, so a third kernel computes dk from ds.
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
// bytes of queries a key, in the 128-byte swizzle). Keys that no query of a tile attends to are not written.
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
  // Blocks that share the keys of a query, and where each stores its dq, f32 [parts, rows of the slice,
  // heads of the slice, width].
  int parts = 1;
  float* q_parts = nullptr;

  __device__ __forceinline__ bool has(int query_tile, int key_tile) const {
    return query_tile - band < key_tile && key_tile <= query_tile;
  }
  // REQUIRES: the slice has this tile.
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

// The values that a kernel needs of each query of a tile. A warp loads them; queries past the sequence see no key.
template <int kQueries>
struct QueryColumns {
  float lse2[kQueries], delta[kQueries];
  int first[kQueries];
};
template <int kQueries>
__device__ __forceinline__ void load_columns(QueryColumns<kQueries>& columns, const RowSums& sums,
                                             const AttentionSizes& z, int b, int h, int row) {
  const int64_t at = (int64_t{b} * z.heads + h) * z.rows;
#pragma unroll
  for (int i = threadIdx.x % 32; i < kQueries; i += 32) {
    const int r = row + i;
    const bool exists = r < z.rows;
    columns.lse2[i] = exists ? sums.lse2[at + r] : 0.0f;
    columns.delta[i] = exists ? sums.delta[at + r] : 0.0f;
    columns.first[i] = exists ? static_cast<int>(first_key(z, b, r)) : 0x7fffffff;
  }
}

// From scores [keys, queries] of a stage whose first query is at `position`: probabilities in
// place, 0 where unseen.
template <class Columns, int kNum>
__device__ __forceinline__ void probabilities_of(float (&s)[kNum], const Columns& columns, float scale2, int key,
                                                 int position) {
  const Fragment at = fragment();
  const int group_key = key - at.row;  // of the warpgroup's first row
  const bool whole = columns.first[2 * kNum - 1] <= group_key && position >= group_key + 63;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto lse2 = *reinterpret_cast<const float2*>(columns.lse2 + 8 * j + at.col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s[4 * j + 2 * i] = exp2_approx(s[4 * j + 2 * i] * scale2 - lse2.x);
      s[4 * j + 2 * i + 1] = exp2_approx(s[4 * j + 2 * i + 1] * scale2 - lse2.y);
    }
  }
  if (whole) return;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto first = *reinterpret_cast<const int2*>(columns.first + 8 * j + at.col);
    const int query = position + 8 * j + at.col;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int my_key = key + 8 * i;
      if (my_key < first.x || my_key > query) s[4 * j + 2 * i] = 0;
      if (my_key < first.y || my_key > query + 1) s[4 * j + 2 * i + 1] = 0;
    }
  }
}

template <class Columns, int kNum>
__device__ __forceinline__ void dscores_of(float (&dp)[kNum], const float (&p)[kNum], const Columns& columns) {
  const int col = fragment().col;
#pragma unroll
  for (int j = 0; j < kNum / 4; ++j) {
    const auto delta = *reinterpret_cast<const float2*>(columns.delta + 8 * j + col);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int e = 4 * j + 2 * i;
      dp[e] = p[e] * (dp[e] - delta.x);
      dp[e + 1] = p[e + 1] * (dp[e + 1] - delta.y);
    }
  }
}

struct BwdMaps {
  CUtensorMap q, dout, k, v;
};
inline BwdMaps bwd_maps(const AttentionBwd& a, uint32_t queries, uint32_t keys) {
  return {.q = rows_map(a.q_THd, a.batch, queries),
          .dout = rows_map(a.do_THd, a.batch, queries),
          .k = rows_map(a.k_TGd, a.batch, keys),
          .v = rows_map(a.v_TGd, a.batch, keys)};
}

// dq, dk and dv, slice by slice. scratch: plan.bytes(), at a multiple of 256.
void sm90_fused_bwd(Stream& s, const AttentionBwd& a, const RowSums& sums, const FusedPlan& plan, void* scratch);
// dk and dv of the slice of `ds`, whose tiles are filled unless it has none.
void sm90_dkv(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds);
// dv of the slice of `ds`, whose tiles are filled, for heads of 256.
void sm90_dv_and_ds(Stream& s, const AttentionBwd& a, const RowSums& sums, const DsTiles& ds);
// dk of the slice from the tiles of `ds`, for heads of 256.
void sm90_dk_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds);
// dq of the slice from the tiles of `ds`.
void sm90_dq_of_ds(Stream& s, const AttentionBwd& a, const DsTiles& ds);
// dq of all rows, from recomputed scores.
void sm90_dq(Stream& s, const AttentionBwd& a, const RowSums& sums);

}  // namespace moebius::cuda
