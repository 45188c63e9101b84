// The parts of the kernel that computes dq, dk and dv of bf16 on sm_90a, with five products.
//
// A block is 128 keys of one kv head of one sequence. Keys run along the rows of its scores, 64 for
// each of two warpgroups. It walks tiles of queries from the last one to that of its own keys, and dk
// and dv stay in registers. For dq each warpgroup multiplies the ds of both with the keys, for its half
// of a tile: some columns of all queries, or all columns of some queries. It does so one step later,
// so that neither waits for the other's ds.
//
// The copy engine adds dq to f32 sums in memory. For each half of a tile a counter says how many blocks
// of keys were added, and a block waits until all earlier ones were. The blocks of a kv group walk the
// same tiles in one direction, so a block that begins together with the one before it follows it at
// a distance of one step, and finds the tiles in L2.
//
// A block takes a ticket when it begins, which says its keys. It waits only for blocks with lower
// tickets, which have begun. So some block can always go on, whatever else the GPU runs.
#pragma once

#include "ops/attention/sm90/attention_bwd.h"

namespace moebius::cuda {

constexpr int kFusedConsumers = 2 * kGroupThreads;

// The place of a part of dq within a tile. A part is 64 rows x 32 columns: a thread has four float4 of its
// accumulators, one for each 8 columns.
struct DqPart {
  int row, column;
};

// The tiles of a width. A piece is what a warpgroup multiplies, and hands over, at a time.
template <int kWidth_>
struct FusedTile;

template <>
struct FusedTile<64> {
  static constexpr int kWidth = 64, kValues = 64, kStages = 2, kDqStages = 1, kPieces = 1;
  __host__ __device__ static constexpr int piece_columns(int) { return 64; }
  __host__ __device__ static constexpr DqPart part(int half, int part) { return {64 * half, 32 * part}; }
};

template <>
struct FusedTile<128> {
  static constexpr int kWidth = 128, kValues = 128, kStages = 2, kDqStages = 2, kPieces = 1;
  __host__ __device__ static constexpr int piece_columns(int) { return 64; }
  __host__ __device__ static constexpr DqPart part(int half, int part) { return {0, 64 * half + 32 * part}; }
};

// A half is 96 of 192 columns: 32 of the middle 64, and 64 at an end.
template <>
struct FusedTile<192> {
  static constexpr int kWidth = 192, kValues = 128, kStages = 2, kDqStages = 1, kPieces = 2;
  __host__ __device__ static constexpr int piece_columns(int piece) { return piece == 0 ? 32 : 64; }
  __host__ __device__ static constexpr DqPart part(int half, int part) {
    return {0, part == 0 ? 64 + 32 * half : 128 * half + 32 * (part - 1)};
  }
};

// The sizes that follow from these.
template <int kWidth_>
struct FusedShape : FusedTile<kWidth_> {
  using Tile = FusedTile<kWidth_>;
  static constexpr int kRows = fused_tile_rows(kWidth_), kKeys = 128;
  // A warpgroup's half of a tile's dq, in the order of its threads: a float4 of all threads, then the next.
  static constexpr int kHalfFloats = kRows * Tile::kWidth / 2, kParts = kHalfFloats / 64 / 32;
  static constexpr int kDqSlotBytes = 64 * 64 * 4;  // bytes of a piece, at most
  using Keys = Sm90Tile<kKeys, Tile::kWidth>;
  using Values = Sm90Tile<kKeys, Tile::kValues>;
  using Queries = Sm90Tile<kRows, Tile::kWidth>;
  using Outputs = Sm90Tile<kRows, Tile::kValues>;
  struct Columns {  // of the queries of a stage
    float lse2[kRows], delta[kRows];
    int first[kRows];
  };
  struct Shared {
    unsigned char k[Keys::kBytes], v[Values::kBytes];
    unsigned char q[Tile::kStages][Queries::kBytes], dout[Tile::kStages][Outputs::kBytes];
    unsigned char ds[2][kRows / 64][2][kDsTileBytes];    // of even and odd steps, of 64 queries, of 64 keys
    unsigned char dq[2][Tile::kDqStages][kDqSlotBytes];  // of a warpgroup, on its way to memory
    Columns columns[Tile::kStages];
    uint64_t keys_full, full[Tile::kStages], empty[Tile::kStages], ds_full[2], ds_empty[2];
    uint64_t dq_full[2][Tile::kDqStages], dq_empty[2][Tile::kDqStages];
    int ticket, end_tile;
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

// The blocks of a slice share these. A kv group is a kv head of a sequence with its query heads.
struct FusedSlice {
  float* dq;              // f32 sums, [groups, heads of a group, tiles, 2, half a tile]
  int* added;             // [groups, heads of a group, tiles, 2]: blocks of keys that were added
  int* tickets;           // blocks that have begun
  int first, groups;      // group b kv_heads + g is kv head g of sequence b
  int wave;               // groups whose blocks begin in turn
  int key_blocks, tiles;  // of a group
  bool heads_outer;       // of a walk: for windows, whose blocks are of one length and walk different tiles
};

struct FusedWork {
  int b, kv_head;
  int group;  // in the slice
  int block, key;
};

// More queries attend to earlier keys, so the longest blocks of a wave begin first.
__device__ __forceinline__ FusedWork work_of_ticket(const FusedSlice& f, const AttentionSizes& z, int ticket) {
  const int blocks = f.wave * f.key_blocks, wave = ticket / blocks, at = ticket % blocks,
            groups = min(f.wave, f.groups - wave * f.wave);
  FusedWork w;
  w.group = wave * f.wave + at % groups;
  w.block = at / groups;
  w.key = w.block * FusedShape<128>::kKeys;
  w.b = (f.first + w.group) / z.kv_heads;
  w.kv_head = (f.first + w.group) % z.kv_heads;
  return w;
}

// The first tile with a query that sees the key, if no document or window hides it.
template <class Shape>
__device__ __forceinline__ int64_t first_tile(const AttentionSizes& z, int key) {
  return (key > z.shift ? key - z.shift : 0) / Shape::kRows;
}

// Tiles [begin, end) from the last one on: all heads of the group for a tile, or all tiles of a head.
struct FusedWalk {
  int begin, end, heads;
  bool heads_outer;
  int tile = end - 1, head = 0;
  __device__ __forceinline__ int steps() const { return (end - begin) * heads; }
  __device__ __forceinline__ void next() {
    if (!heads_outer) {
      if (++head == heads) head = 0, --tile;
    } else if (--tile < begin) {
      tile = end - 1, ++head;
    }
  }
};

// The columns of a stage pass between warps as those of attention_dkv.cu do.
template <class Shape>
__device__ void load_queries(typename Shape::Shared& shared, const BwdMaps& maps, const RowSums& sums,
                             const AttentionSizes& z, const FusedWork& w, FusedWalk walk) {
  const int lane = threadIdx.x % 32;
  if (walk.steps() == 0) return;
  if (lane == 0) {
    const uint32_t full = smem_addr(&shared.keys_full);
    mbarrier_arrive_expect(full, Shape::Keys::kBytes + Shape::Values::kBytes);
    Shape::Keys::load(smem_addr(shared.k), &maps.k, full, w.kv_head, w.key, w.b);
    Shape::Values::load(smem_addr(shared.v), &maps.v, full, w.kv_head, w.key, w.b);
  }
  Ring<Shape::kStages> ring;
  for (int step = 0; step < walk.steps(); ++step, ring.advance(), walk.next()) {
    const int h = w.kv_head * walk.heads + walk.head, row = walk.tile * Shape::kRows;
    const uint32_t full = smem_addr(&shared.full[ring.stage]);
    mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
    if (lane == 0) {
      mbarrier_arrive_expect(full, Shape::Queries::kBytes + Shape::Outputs::kBytes);
      Shape::Queries::load(smem_addr(shared.q[ring.stage]), &maps.q, full, h, row, w.b);
      Shape::Outputs::load(smem_addr(shared.dout[ring.stage]), &maps.dout, full, h, row, w.b);
    }
    typename Shape::Columns& columns = shared.columns[ring.stage];
    const int64_t at = (int64_t{w.b} * z.heads + h) * z.rows;
#pragma unroll
    for (int i = lane; i < Shape::kRows; i += 32) {
      const int r = row + i;
      const bool exists = r < z.rows;
      columns.lse2[i] = exists ? sums.lse2[at + r] : 0.0f;
      columns.delta[i] = exists ? sums.delta[at + r] : 0.0f;
      columns.first[i] = exists ? static_cast<int>(first_key(z, w.b, r)) : 0x7fffffff;
    }
    mbarrier_arrive(full);
  }
}

__device__ __forceinline__ int load_acquire(const int* from) {
  int x;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(x) : "l"(from) : "memory");
  return x;
}
__device__ __forceinline__ void store_release(int* to, int x) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(to), "r"(x) : "memory");
}
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }
__device__ __forceinline__ void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}

// One thread adds the dq of a warpgroup. The fences order what the copy engine does against the accesses to counters,
// which are ordinary ones.
template <class Shape>
__device__ void add_dq(typename Shape::Shared& shared, const FusedSlice& f, const AttentionSizes& z, const FusedWork& w,
                       FusedWalk walk, int half) {
  Ring<Shape::kDqStages> ring;
  const int first_head = w.group * walk.heads;
  int before = 0;
  for (int step = 0; step < walk.steps(); ++step, walk.next()) {
    if (walk.head == 0 || walk.heads_outer)
      before = w.block - static_cast<int>(first_key(z, w.b, walk.tile * Shape::kRows)) / Shape::kKeys;
    const int at = ((first_head + walk.head) * f.tiles + walk.tile) * 2 + half;
    int* const added = f.added + at;
    if (before > 0) {
      while (load_acquire(added) < before) {
      }
    }
    float* to = f.dq + int64_t{at} * Shape::kHalfFloats;
#pragma unroll
    for (int piece = 0; piece < Shape::kPieces; ++piece, ring.advance()) {
      const int floats = 64 * Shape::piece_columns(piece);
      mbarrier_wait(smem_addr(&shared.dq_full[half][ring.stage]), ring.parity);
      fence_proxy_async_global();
      const uint32_t from = smem_addr(shared.dq[half][ring.stage]);
      if (before > 0)
        bulk_add(to, from, floats * 4);
      else
        bulk_store(to, from, floats * 4);
      tma_commit();
      tma_wait_read<0>();
      mbarrier_arrive(smem_addr(&shared.dq_empty[half][ring.stage]));
      to += floats;
    }
    tma_wait<0>();
    fence_proxy_async_global();
    store_release(added, before + 1);
  }
}

// Clears the probabilities of keys from `end` on, which are zeros in shared memory. Queries of a part may come after
// them, and where lse is far below zero their probabilities overflow.
template <int kNum>
__device__ __forceinline__ void clear_keys_past(float (&p)[kNum], int key, int64_t end) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    if (key + 8 * i < end) continue;
#pragma unroll
    for (int j = 0; j < kNum / 4; ++j) p[4 * j + 2 * i] = p[4 * j + 2 * i + 1] = 0;
  }
}

// A warp's 16 keys of a tile of ds, [keys, queries]: 16 queries for each four words, from 16 kFrom on.
template <int kFrom, int kNum>
__device__ __forceinline__ void store_ds(uint32_t tile, const uint32_t* words) {
  const uint32_t lane = threadIdx.x % 32, at = tile + threadIdx.x / 32 % 4 * 2048;
#pragma unroll
  for (uint32_t j = 0; j < kNum / 4; ++j) {
    stmatrix_4(at + swizzle_128(lane % 16, 2 * (kFrom + j) + lane / 16), words[4 * j], words[4 * j + 1],
               words[4 * j + 2], words[4 * j + 3]);
  }
}

// A warpgroup hands one piece of its dq to the thread that adds it.
template <class Shape, int kNum>
__device__ __forceinline__ void pass_dq(typename Shape::Shared& shared, int half, int stage, const float (&dq)[kNum]) {
  auto* const to = reinterpret_cast<float4*>(shared.dq[half][stage]) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kNum / 4; ++i) to[i * kGroupThreads] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
  fence_proxy_async();
  __syncwarp();
  if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.dq_full[half][stage]));
}

// dq [64 queries, .] = ds of all keys of the block, [keys, queries] from `ds`, times columns of the keys from `k`.
template <class Keys, int kNum>
__device__ __forceinline__ void start_dq(float (&dq)[kNum], uint32_t ds, uint32_t k) {
  const uint64_t left = wgmma_operand<Major::mn>(ds);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Major::mn, Major::mn>::multiply(dq, left + step * (2048 >> 4), Keys::along(k, step), step > 0);
  wgmma_commit();
}

}  // namespace moebius::cuda
