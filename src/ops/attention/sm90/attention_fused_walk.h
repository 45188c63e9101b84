// The order of work of the kernel that computes dq, dk and dv: which keys a block takes, and which tiles
// of queries it walks for them. attention_fused_bwd.h describes the kernel.
#pragma once

#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {

struct FusedWork {
  int b, kv_head;
  int group;       // in the slice
  int block, key;  // block: -1 if there is no more work
  int begin, end;  // tiles of queries
  int turn;        // the first tile of a walk upwards; the end: the walk is downwards (FusedWalk)
  int finish_end;  // tiles before this one get their last dq from this block
};

// The blocks of a slice share these. A kv group is a kv head of a sequence with its query heads.
struct FusedSlice {
  float* dq;                     // f32 sums, [groups, heads of a group, tiles, 2, half a tile]
  int* added;                    // [groups, heads of a group, tiles, 2]: blocks of keys that were added
  int* tickets;                  // blocks that have begun
  int first, groups;             // group b kv_heads + g is kv head g of sequence b
  int wave;                      // groups whose blocks begin in turn
  int key_blocks, tiles, heads;  // of a group
  bool heads_outer;              // of a walk: for windows, whose blocks are of one length and walk different tiles
  int set;                       // blocks of a set; every other set of a group walks upwards. 0: none does
};

// Every other set of blocks walks upwards, so that its blocks share tiles in L2. An example has tiles of 64 rows and 8
// heads: the 128 keys of a block are two tiles, or 16 steps.
//
// The blocks of a set that walks downwards begin together, at the last tile. Each ends at the tiles of its own keys, 16
// steps before the block with the keys before. So the blocks of the next set begin 16 steps apart, its first one first.
//
// If these walked downwards too, all would begin at the last tile, and the first of 132 would be 131 x 16 steps ahead
// of the last: 262 tiles of 8 heads. Their q, do and sums of dq are 137 MB, and L2 holds 50 MB.
//
// They walk upwards, and begin at the tiles of their own keys. In the 16 steps before the next block begins, a block
// walks over the two tiles of its own keys. It is then where the next block begins. So all blocks walk together, find
// the tiles in L2, and end together at the last tile. The next set begins there, and walks downwards.
//
// A block adds its dq of a tile after the block before it, which would be at the same step. So a block begins above the
// tiles of its own keys, by kLateSteps steps for each block of the set after it. It is then kLateSteps steps ahead of
// the next block, which does not wait. It walks over the tiles that it left out at the end.
constexpr int kLateSteps = 3;

// More queries attend to earlier keys, so the longest blocks of a wave begin first. All lanes of a warp call it.
template <class Shape>
__device__ __forceinline__ FusedWork work_of_ticket(const FusedSlice& f, const AttentionSizes& z, int ticket) {
  const int blocks = f.wave * f.key_blocks, wave = ticket / blocks, at = ticket % blocks,
            groups = min(f.wave, f.groups - wave * f.wave);
  FusedWork w{.block = -1};
  if (groups <= 0 || at / groups >= f.key_blocks) return w;  // the last wave may have fewer groups
  w.group = wave * f.wave + at % groups;
  w.block = at / groups;
  w.key = w.block * Shape::kKeys;
  w.b = (f.first + w.group) / z.kv_heads;
  w.kv_head = (f.first + w.group) % z.kv_heads;
  // The first tile with a query that attends to a key, if no document or window hides it.
  const int64_t begin = (w.key > z.shift ? w.key - z.shift : 0) / Shape::kRows,
                key_end = min(int64_t{w.key} + Shape::kKeys, z.kv_rows),
                rows_end = seen_end(z, w.b, begin * Shape::kRows, key_end);
  w.begin = static_cast<int>(begin);
  w.end = static_cast<int>(max(begin, (rows_end + Shape::kRows - 1) / Shape::kRows));
  w.turn = w.end;
  if (f.set > 0 && w.block / f.set % 2 == 1) {
    const int last = min((w.block / f.set + 1) * f.set, f.key_blocks) - 1;
    w.turn = min(w.end, w.begin + (last - w.block) * kLateSteps / f.heads);
  }
  w.finish_end =
      w.block == f.key_blocks - 1 ? INT_MAX : static_cast<int>((w.key + Shape::kKeys - z.shift) / Shape::kRows);
  return w;
}

// Tiles [begin, end): all heads of the group for a tile, or all tiles of a head. Downwards, turn is the end, and the
// walk goes from the last tile down. Upwards it goes from tile `turn` up to the last one, and then from the tile
// before `turn` down to begin.
struct FusedWalk {
  int begin, end, turn, heads;
  bool heads_outer;
  int tile = turn < end ? turn : end - 1, head = 0;
  __device__ __forceinline__ int steps() const { return (end - begin) * heads; }
  __device__ __forceinline__ void next() {
    if (!heads_outer) {
      if (++head < heads) return;
      head = 0;
      if (tile < turn)
        --tile;
      else if (++tile == end)
        tile = turn - 1;
    } else if (--tile < begin) {
      tile = end - 1, ++head;
    }
  }
  // The reverse. The step before the first one is not of the walk: callers do not use it.
  __device__ __forceinline__ void back() {
    if (!heads_outer) {
      if (--head >= 0) return;
      head = heads - 1;
      if (tile >= turn)
        --tile;
      else if (++tile == turn)
        tile = end - 1;
    } else if (++tile == end) {
      tile = begin, --head;
    }
  }
};
__device__ __forceinline__ FusedWalk walk_of(const FusedWork& w, const FusedSlice& f) {
  return {.begin = w.begin, .end = w.end, .turn = w.turn, .heads = f.heads, .heads_outer = f.heads_outer};
}

}  // namespace moebius::cuda
