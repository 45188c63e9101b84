// The backward pass of the sm90 kernels computes five products instead of seven by one of three methods. They work
// slice by slice, so that their scratch is bounded:
//
// - One kernel computes dq, dk and dv (FusedPlan). Its blocks add dq to f32 sums.
// - One kernel computes dk, dv and ds, the gradients of the scores (DsPlan). The next one multiplies ds with the keys
//   for dq.
// - With heads of 256 one kernel computes dv and ds (DsPlan), and two others multiply ds for dk and for dq.
//
// bwd_path() chooses between them by shape. The slices, and the order of all sums, depend on the sizes alone; where the
// call owns the GPU, the order of dk and dv depends on its number of multiprocessors too (alternating_set).
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "ops/attention/attention.h"

namespace moebius {

// ds of a head is kept in tiles of 64 keys x 64 queries in bf16.
inline constexpr int64_t kDsEdge = 64, kDsTileBytes = kDsEdge * kDsEdge * 2;

struct DsSizes {
  int64_t batch, rows;  // sequences, and rows of one
  int64_t heads, kv_heads, width, v_width;
  int64_t window = 0;  // 0: none
  bool has_documents = false;
  bool is_part = false;
  bool owns_gpu = false;  // AttentionBwd::owns_gpu
  int64_t num_tiles() const { return (rows + kDsEdge - 1) / kDsEdge; }
  // Returns the maximum number of key tiles that a query tile attends to.
  int64_t band() const {
    const int64_t seen = window > 0 ? (window - 1 + kDsEdge - 1) / kDsEdge + 1 : num_tiles();
    return std::min(seen, num_tiles());
  }
  // Tiles of the query tiles before this one, of one head: those at and below the diagonal.
  int64_t tiles_before(int64_t query_tile) const {
    const int64_t rising = std::min(query_tile, band());
    return rising * (rising + 1) / 2 + (query_tile - rising) * band();
  }
};

// Sequences, kv heads and query tiles from the first ones on.
struct DsSlice {
  int64_t sequence = 0, sequences = 0, kv_head = 0, kv_heads = 0, query_tile = 0, query_tiles = 0;
};

struct DsPlan {
  std::vector<DsSlice> slices;  // in the order of the sums; none: ds is not kept, and scores are computed twice
  // Query tiles are split between slices too. Then a slice adds its dk and dv to f32 sums of the kv heads of a slice,
  // and several blocks share the keys of a query, whose dq are added in the order of the keys.
  bool cuts_queries = false;
  int64_t ds_bytes = 0;       // bytes of ds in the largest slice
  int64_t kv_sums_bytes = 0;  // bytes of dk and dv of a slice
  int64_t q_parts_bytes = 0;  // bytes of dq of a slice, where several blocks share the keys
  int64_t bytes() const { return ds_bytes + kv_sums_bytes + q_parts_bytes; }
};

// A kv group that needs more ds, or more sums of dq, does not keep them.
inline constexpr int64_t kMaxDsBytes = int64_t{1280} << 20;
// The sums of dq of a slice; a kv group that needs more, up to kMaxDsBytes, is a slice of its own.
inline constexpr int64_t kMaxDqBytes = int64_t{512} << 20;

// Returns the queries of a tile of the kernel that computes dq, dk and dv. Where heads are narrow, registers are left
// for more of them.
constexpr int64_t fused_tile_rows(int64_t width) { return width == 64 ? 128 : 64; }

// Slices of the kernel that computes dq, dk and dv. A kv group is a kv head of a sequence with its query heads; group
// b kv_heads + g is kv head g of sequence b.
struct FusedPlan {
  int64_t groups_of_slice = 0;  // kv groups; the last slice may have fewer. 0: the sums of one group do not fit
  int64_t wave = 0;             // kv groups of a slice whose blocks begin one after another
  int64_t dq_bytes = 0;         // f32 sums of dq of a slice
  int64_t counter_bytes = 0;    // i32 counters of a slice: of each half of a query tile, and of blocks
  int64_t bytes() const { return dq_bytes + counter_bytes; }
};

// max_dq_bytes: the maximum of dq_bytes, unless one kv group needs more.
// max_group_bytes: what one kv group may need.
FusedPlan fused_plan(const DsSizes& z, int64_t max_dq_bytes, int64_t max_group_bytes);

// Returns the number of blocks of 128 keys in a set, if sets of a kv group walk the queries downwards and upwards in
// turn; 0: all blocks walk downwards. A set has as many blocks as the GPU has multiprocessors. This order moves fewer
// bytes (attention_fused_walk.h says why), but dk and dv are summed in the order of the walk. It is taken where all of
// these hold:
//
// - The call owns the GPU. Where another kernel holds a multiprocessor, the last block of a set downwards begins when
//   the others end, and blocks upwards wait for it at their first tiles.
// - Attention is causal over whole sequences, without windows and documents, and 4 or more heads share a kv head. Then
//   later blocks have fewer tiles, and enough steps in each that the difference is long.
// - Heads are of 64 or of 128: the other kernels were not measured in this order.
// - A group has enough blocks that a wave is one group.
// - The number of sets is even, and the last one lacks at most a 25th of the blocks of the group. Then the blocks of
//   the next group begin one after the other, as these do.
int64_t alternating_set(const DsSizes& z, int64_t multiprocessors);

// Returns the keys that the products of a tile of 128 queries have, for a window of `window` keys: whole tiles of 64.
constexpr int64_t keys_of_window(int64_t window) { return kDsEdge * (2 + (window - 1 + kDsEdge - 1) / kDsEdge); }
// The operations of products in the time in which one byte is read or written: those of machines/h100.toml. GPUs with
// faster memory have fewer, and then the sums below are less work still.
inline constexpr int64_t kOperationsOfByte = 256;

// Returns the kernels for a shape. Heads of 96 and of 256 have one path, which may not support the shape. Of the
// others, those whose scratch is bounded:
//
// - One kernel, unless a window is of at most 512 keys: by measurement the fastest. With documents too, but for heads
//   of 64 and at most 4096 rows without a window: there scores that are computed twice were the fastest.
// - With such a window, the kernels with ds, if ds can be kept. It cannot be kept for a part, and with documents that
//   do not fit.
// - With such a window and no ds, one kernel or scores that are computed twice: what is less work for a query of a
//   head. The sums of dq are written and read, in f32. Instead of this the second of two kernels reads q and do again,
//   and multiplies scores and dp again. With K = keys_of_window() one kernel is used if
//
//     8 d  <=  2 (d + dv) + 2 (d + dv) K / kOperationsOfByte
//
//   All sums are counted, though L2 holds many of them. For d = dv this is K >= 256: windows of 66 or more. For latent
//   attention (192/128) it is K >= 359: windows of 194 or more.
// - Scores that are computed twice, if nothing else is bounded.
AttentionBwdPath bwd_path(const DsSizes& z);
// Returns whether the kernels support the shape.
bool can_take(const DsSizes& z, AttentionBwdPath path);

// Returns the slices. The host does not know document starts: with documents ds is kept only if all of it fits.
// max_ds_bytes: the maximum of ds_bytes, unless one query tile of one kv head needs more.
DsPlan ds_plan(const DsSizes& z, int64_t max_ds_bytes);

// Returns the number of thread blocks that share the keys of a query tile of a slice, enough to fill a Hopper GPU.
int64_t dq_parts(const DsSizes& z, const DsSlice& slice);
// Returns the query tiles of a thread block that computes dq.
constexpr int64_t dq_tiles_of_block(int64_t width) { return width == 192 ? 4 : 2; }

// Returns the one path that the kernels have for heads of this width; chosen: they have all.
constexpr AttentionBwdPath only_path(int64_t width) {
  return width == 96    ? AttentionBwdPath::one_kernel
         : width == 256 ? AttentionBwdPath::kept_ds
                        : AttentionBwdPath::chosen;
}

}  // namespace moebius
