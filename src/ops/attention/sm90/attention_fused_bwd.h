// The parts of the kernel that computes dq, dk and dv of bf16 on sm_90a, with five products.
//
// Its work is 128 keys of one kv head of one sequence. Keys run along the rows of its scores, 64 for
// each of two warpgroups. It walks the tiles of queries that attend to its keys, from the last one down
// (or upwards: attention_fused_walk.h), and dk and dv stay in registers. For dq each warpgroup
// multiplies the ds of both with the keys, for its half of a tile: some columns of all queries, or all
// columns of some queries. It does so one step later, so that neither waits for the other's ds.
//
// The copy engine adds dq to f32 sums in memory. For each half of a tile a counter says how many blocks
// of keys were added, and a block waits until all earlier ones were. The last of them adds to what it
// reads, and writes dq itself. The blocks of a kv group that run together walk the same tiles in one
// direction, so a block that begins together with the one before it follows it at a distance of a few
// steps, and finds the tiles in L2.
//
// A thread block stays on its multiprocessor and computes one block of 128 keys after another. A ticket
// selects the next keys, and the block requests the next ticket while it still multiplies. It waits
// only for lower tickets. The thread blocks of those run, and have no lower ones left. So some block can
// always continue, whatever else the GPU runs.
#pragma once

#include "ops/attention/sm90/attention_bwd.h"
#include "ops/attention/sm90/attention_fused_walk.h"

namespace moebius::cuda {

constexpr int kFusedConsumers = 2 * kGroupThreads;

// The place of a part of dq within a tile. A part is 64 rows x 32 columns: a thread has four float4 of its
// accumulators, one for each 8 columns.
struct DqPart {
  int row, column;
};

// The tiles of a width. A piece is what a warpgroup multiplies, and hands over, at a time. A warpgroup has the first 16
// kHeld columns of its keys in registers, so the scores read less shared memory: half of 128 columns, for which
// registers are free.
template <int kWidth_>
struct FusedTile;

template <>
struct FusedTile<64> {
  static constexpr int kWidth = 64, kValues = 64, kStages = 2, kDqStages = 1, kPieces = 1, kHeld = 0;
  __host__ __device__ static constexpr int piece_columns(int) { return 64; }
  __host__ __device__ static constexpr DqPart part(int half, int part) { return {64 * half, 32 * part}; }
};

template <>
struct FusedTile<128> {
  static constexpr int kWidth = 128, kValues = 128, kStages = 2, kDqStages = 2, kPieces = 1, kHeld = 4;
  __host__ __device__ static constexpr int piece_columns(int) { return 64; }
  __host__ __device__ static constexpr DqPart part(int half, int part) { return {0, 64 * half + 32 * part}; }
};

// The halves are 64 and 32 columns. Both warpgroups multiply 64 columns of the keys, the second one 32 that are zeros.
// All scores take keys from registers.
template <>
struct FusedTile<96> {
  static constexpr int kWidth = 96, kValues = 96, kStages = 2, kDqStages = 2, kPieces = 1, kHeld = 6;
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
  static constexpr bool kIsUneven = kWidth_ % 64 != 0;  // the second half of a tile has fewer columns
  // A warpgroup's half of a tile's dq, in the order of its threads: a float4 of all threads, then the next.
  static constexpr int kTileFloats = kRows * Tile::kWidth, kHalfFloats = kIsUneven ? kRows * 64 : kTileFloats / 2;
  __device__ __forceinline__ static int piece_columns_of(int half, int piece) {
    return kIsUneven && half == 1 ? Tile::kWidth % 64 : Tile::piece_columns(piece);
  }
  static constexpr int kDqSlotBytes = 64 * 64 * 4;  // bytes of a piece, at most
  using Keys = Sm90Tile<kKeys, Tile::kWidth>;
  using Values = Sm90Tile<kKeys, Tile::kValues>;
  using Queries = Sm90Tile<kRows, Tile::kWidth>;
  using Outputs = Sm90Tile<kRows, Tile::kValues>;
  using Columns = QueryColumns<kRows>;  // of a stage
  struct Shared {
    unsigned char k[Keys::kBytes], v[Values::kBytes];
    unsigned char q[Tile::kStages][Queries::kBytes], dout[Tile::kStages][Outputs::kBytes];
    unsigned char ds[2][kRows / 64][2][kDsTileBytes];    // of even and odd steps, of 64 queries, of 64 keys
    unsigned char dq[2][Tile::kDqStages][kDqSlotBytes];  // of a warpgroup, on its way to memory
    Columns columns[Tile::kStages];
    uint64_t keys_full, keys_empty, values_full, values_empty, full[Tile::kStages], empty[Tile::kStages], ds_full[2],
        ds_empty[2];
    uint64_t dq_full[2][Tile::kDqStages], dq_empty[2][Tile::kDqStages];
    uint64_t sums_full[2][Tile::kDqStages];  // the sums of earlier blocks are where dq otherwise is
    uint64_t work_full[2], work_empty[2];
    FusedWork work[2];
    bool has_sums[2][Tile::kDqStages];
  };
  static_assert(sizeof(Shared) <= 227 * 1024);
};

// One warp takes tickets, and requests the tiles of each work item. The columns of a stage pass between warps as those
// of attention_dkv.cu do. The kernel depends on how soon they arrive: it took 1.3 to 1.8 times as long where nvcc waited
// for each load before the next one.
template <class Shape>
__device__ void load_tiles(typename Shape::Shared& shared, const BwdMaps& maps, const RowSums& sums,
                           const FusedSlice& f, const AttentionSizes& z) {
  const int lane = threadIdx.x % 32;
  Ring<2> works;
  Ring<1> keys;
  Ring<Shape::kStages> ring;
  for (;; works.advance()) {
    const FusedWork w = work_of_ticket<Shape>(f, z, __shfl_sync(~0u, lane == 0 ? atomicAdd(f.tickets, 1) : 0, 0));
    mbarrier_wait(smem_addr(&shared.work_empty[works.stage]), works.parity ^ 1);
    if (lane == 0) {
      shared.work[works.stage] = w;
      mbarrier_arrive(smem_addr(&shared.work_full[works.stage]));
    }
    if (w.block < 0) return;
    FusedWalk walk = walk_of(w, f);
    const int steps = walk.steps();
    for (int step = 0; step < steps; ++step, ring.advance(), walk.next()) {
      const int h = w.kv_head * walk.heads + walk.head, row = walk.tile * Shape::kRows;
      const uint32_t full = smem_addr(&shared.full[ring.stage]);
      mbarrier_wait(smem_addr(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (lane == 0) {
        mbarrier_arrive_expect(full, Shape::Queries::kBytes + Shape::Outputs::kBytes);
        Shape::Queries::load(smem_addr(shared.q[ring.stage]), &maps.q, full, h, row, w.b);
        Shape::Outputs::load(smem_addr(shared.dout[ring.stage]), &maps.dout, full, h, row, w.b);
      }
      if (step == 0) {
        const uint32_t keys_full = smem_addr(&shared.keys_full), values_full = smem_addr(&shared.values_full);
        mbarrier_wait(smem_addr(&shared.values_empty), keys.parity ^ 1);
        if (lane == 0) {
          mbarrier_arrive_expect(values_full, Shape::Values::kBytes);
          Shape::Values::load(smem_addr(shared.v), &maps.v, values_full, w.kv_head, w.key, w.b);
        }
        mbarrier_wait(smem_addr(&shared.keys_empty), keys.parity ^ 1);
        if (lane == 0) {
          mbarrier_arrive_expect(keys_full, Shape::Keys::kBytes);
          Shape::Keys::load(smem_addr(shared.k), &maps.k, keys_full, w.kv_head, w.key, w.b);
        }
        keys.advance();
      }
      load_columns(shared.columns[ring.stage], sums, z, w.b, h, row);
      mbarrier_arrive(full);
    }
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
// which are ordinary ones. Where the work has the last keys of a tile, the thread brings the sums so far instead.
template <class Shape>
__device__ void add_dq(typename Shape::Shared& shared, const FusedSlice& f, const AttentionSizes& z, int half) {
  Ring<2> works;
  Ring<Shape::kDqStages> ring;
  for (;; works.advance()) {
    mbarrier_wait(smem_addr(&shared.work_full[works.stage]), works.parity);
    const FusedWork w = shared.work[works.stage];
    mbarrier_arrive(smem_addr(&shared.work_empty[works.stage]));
    if (w.block < 0) return;
    FusedWalk walk = walk_of(w, f);
    const int first_head = w.group * walk.heads, steps = walk.steps();
    int before = 0;
    for (int step = 0; step < steps; ++step, walk.next()) {
      if (walk.head == 0 || walk.heads_outer)
        before = w.block - static_cast<int>(first_key(z, w.b, walk.tile * Shape::kRows)) / Shape::kKeys;
      const int tile = (first_head + walk.head) * f.tiles + walk.tile;
      const bool finishes = walk.tile < w.finish_end;
      int* const added = f.added + (tile * 2 + half);
      if (before > 0) {
        while (load_acquire(added) < before) {
        }
      }
      float* to = f.dq + (int64_t{tile} * Shape::kTileFloats + half * Shape::kHalfFloats);
#pragma unroll
      for (int piece = 0; piece < Shape::kPieces; ++piece, ring.advance()) {
        const int floats = 64 * Shape::piece_columns_of(half, piece);
        const uint32_t slot = smem_addr(shared.dq[half][ring.stage]),
                       dq_full = smem_addr(&shared.dq_full[half][ring.stage]),
                       sums_full = smem_addr(&shared.sums_full[half][ring.stage]);
        if (finishes) {
          shared.has_sums[half][ring.stage] = before > 0;
          if (before > 0) {
            fence_proxy_async_global();
            mbarrier_arrive_expect(sums_full, floats * 4);
            bulk_load(slot, to, floats * 4, sums_full);
          } else {
            mbarrier_arrive(sums_full);
          }
          mbarrier_wait(dq_full, ring.parity);  // the warpgroup has them
        } else {
          mbarrier_wait(dq_full, ring.parity);
          fence_proxy_async_global();
          if (before > 0)
            bulk_add(to, slot, floats * 4);
          else
            bulk_store(to, slot, floats * 4);
          tma_commit();
          tma_wait_read<0>();
        }
        mbarrier_arrive(smem_addr(&shared.dq_empty[half][ring.stage]));
        to += floats;
      }
      if (finishes) continue;
      tma_wait<0>();
      fence_proxy_async_global();
      store_release(added, before + 1);
    }
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

// Transposes 4 x 4 words of 4 lanes: lane c gets word c of all of them.
__device__ __forceinline__ void transpose_words(uint32_t (&x)[4]) {
  const int c = threadIdx.x % 4;
  const uint32_t a0 = c & 1 ? x[0] : x[1], a1 = c & 1 ? x[2] : x[3];
  const uint32_t b0 = __shfl_xor_sync(~0u, a0, 1), b1 = __shfl_xor_sync(~0u, a1, 1);
  if (c & 1)
    x[0] = b0, x[2] = b1;
  else
    x[1] = b0, x[3] = b1;
  const uint32_t c0 = c & 2 ? x[0] : x[2], c1 = c & 2 ? x[1] : x[3];
  const uint32_t d0 = __shfl_xor_sync(~0u, c0, 2), d1 = __shfl_xor_sync(~0u, c1, 2);
  if (c & 2)
    x[0] = d0, x[1] = d1;
  else
    x[2] = d0, x[3] = d1;
}

// Stores 64 rows of accumulators, of which the first `rows` exist, 16 bytes of a lane at a time.
// to: the first row and column; stride: elements from one row to the next; word(e): elements e and e + 1 as bf16.
template <int kNum, class Word>
__device__ __forceinline__ void store_chunks(__nv_bfloat16* to, int64_t stride, int64_t rows, Word&& word) {
  // Four lanes have a row: lane c gets chunk c of the 8 columns of each 32.
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  to += row * stride + 8 * (lane % 4);
#pragma unroll
  for (int part = 0; part < kNum / 16; ++part) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) x[j] = word(16 * part + 4 * j + 2 * i);
      transpose_words(x);
      if (row + 8 * i < rows) *reinterpret_cast<uint4*>(to + 8 * i * stride + 32 * part) = {x[0], x[1], x[2], x[3]};
    }
  }
}
template <int kNum>
__device__ __forceinline__ void store_chunks(__nv_bfloat16* to, int64_t stride, int64_t rows, const float (&sums)[kNum],
                                             float factor) {
  store_chunks<kNum>(to, stride, rows, [&](int e) { return pack_bf16(sums[e] * factor, sums[e + 1] * factor); });
}

// The tensors that the kernel writes.
struct FusedOutputs {
  __nv_bfloat16 *dq, *dk, *dv;
};

// The dq of a warpgroup: its side of what add_dq does. use: how many pieces it handed over before, of all works.
template <class Shape>
struct DqHandOver {
  static constexpr int kPlaces = Shape::kDqStages;
  typename Shape::Shared& shared;
  const AttentionSizes& z;
  int half;
  uint32_t sums_parity = 0;  // a bit for each place

  __device__ __forceinline__ void wait_for_place(unsigned use) const {
    mbarrier_wait(smem_addr(&shared.dq_empty[half][use % kPlaces]), (use / kPlaces & 1) ^ 1);
  }
  // Hands one piece to the thread that adds it. REQUIRES: there is a place.
  template <int kNum>
  __device__ __forceinline__ void pass(unsigned use, const float (&dq)[kNum]) {
    auto* const to = reinterpret_cast<float4*>(shared.dq[half][use % kPlaces]) + threadIdx.x % kGroupThreads;
#pragma unroll
    for (int i = 0; i < kNum / 4; ++i) {
      if (8 * i >= 32 && is_narrow()) break;
      to[i * kGroupThreads] = {dq[4 * i], dq[4 * i + 1], dq[4 * i + 2], dq[4 * i + 3]};
    }
    fence_proxy_async();
    release(use);
  }
  // Adds a piece to the sums so far, and writes it. part: its first one.
  template <int kNum>
  __device__ __forceinline__ void finish(unsigned use, const float (&dq)[kNum], __nv_bfloat16* dq_out,
                                         const FusedWork& w, const FusedWalk& walk, int part) {
    const unsigned place = use % kPlaces;
    mbarrier_wait(smem_addr(&shared.sums_full[half][place]), sums_parity >> place & 1);
    sums_parity ^= 1u << place;
    if (is_narrow())
      write(place, columns_of<0, 16>(dq), dq_out, w, walk, part);
    else
      write(place, dq, dq_out, w, walk, part);
    release(use);
  }

 private:
  // Returns whether the half has 32 columns, where products have 64.
  __device__ __forceinline__ bool is_narrow() const { return Shape::kIsUneven && half == 1; }
  template <int kNum>
  __device__ __forceinline__ void write(unsigned place, const float (&dq)[kNum], __nv_bfloat16* dq_out,
                                        const FusedWork& w, const FusedWalk& walk, int part) const {
    const bool has_sums = shared.has_sums[half][place];
    const auto* const sums = reinterpret_cast<const float2*>(shared.dq[half][place]) + threadIdx.x % kGroupThreads * 2;
    const DqPart at = Shape::part(half, part);
    const int h = w.kv_head * walk.heads + walk.head;
    const int64_t row = int64_t{walk.tile} * Shape::kRows + at.row;
    store_chunks<kNum>(dq_out + ((w.b * z.rows + row) * z.heads + h) * Shape::kWidth + at.column,
                       int64_t{z.heads} * Shape::kWidth, z.rows - row, [&](int e) {
                         const float2 x = has_sums ? sums[e / 4 * kGroupThreads * 2 + e / 2 % 2] : float2{0, 0};
                         return pack_bf16((x.x + dq[e]) * z.scale, (x.y + dq[e + 1]) * z.scale);
                       });
  }
  __device__ __forceinline__ void release(unsigned use) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_addr(&shared.dq_full[half][use % kPlaces]));
  }
};

// sums [64, .] = x rows [x_row, x_row + 64) times y rows from y_row, over the width.
// held: the first 16 kHeld columns of x.
template <class X, class Y, int kWidth, int kHeld, int kNum, int kWords>
__device__ __forceinline__ void start_across(float (&sums)[kNum], uint32_t x, int x_row, uint32_t y, int y_row,
                                             const uint32_t (&held)[kWords]) {
  const Operand<Major::k> left(x + x_row * 128), right(y + y_row * 128);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    if (step < kHeld)
      wgmma_registers<Major::k>(sums, held + 4 * step, right.at(bytes_across<Y>(step)), step > 0);
    else
      Wgmma<Major::k, Major::k>::multiply(sums, left.at(bytes_across<X>(step)), right.at(bytes_across<Y>(step)),
                                          step > 0);
  }
  wgmma_commit();
}
template <class X, class Y, int kWidth, int kNum>
__device__ __forceinline__ void start_across(float (&sums)[kNum], uint32_t x, int x_row, uint32_t y, int y_row) {
  const uint32_t none[1] = {};
  start_across<X, Y, kWidth, 0>(sums, x, x_row, y, y_row, none);
}

// dq [64 queries, .] = ds of all keys of the block, [keys, queries] from `ds`, times columns of the keys from `k`.
template <class Keys, int kNum>
__device__ __forceinline__ void start_dq(float (&dq)[kNum], uint32_t ds, uint32_t k) {
  const Operand<Major::mn> left(ds), right(k, Keys::kBlockBytes);
  wgmma_fence();
#pragma unroll
  for (int step = 0; step < 8; ++step)
    Wgmma<Major::mn, Major::mn>::multiply(dq, left.at(2048 * step), right.at(2048 * step), step > 0);
  wgmma_commit();
}

}  // namespace moebius::cuda
