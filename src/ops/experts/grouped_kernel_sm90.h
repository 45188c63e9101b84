// The kernel around the main loop of grouped_gemm_sm90.h. An Op says where operands come from and what becomes of the
// product of a tile:
//   struct Params { CUtensorMap a, b; Gather gather; RowTiles tiles; int32_t num_k; ... };
//   kGather   rows of A are read by index (cp.async); otherwise by map a, box 64 x 128
//   kMajorB   of the weights' tile
//   load_b(params, load, half, k, tile)   half of the weights' tile: 128 of its 256 columns
//   kPieces, store_piece<i>(params, held, staging)   by a consumer warp: the i-th part of storing its rows of a tile
// A tile is stored while the next one is multiplied: its product, rounded to bf16, waits in registers, and each K step
// stores a piece. Nothing but the rounding stands between the products of two tiles.
#pragma once

#include <type_traits>

#include "ops/experts/grouped_gemm_sm90.h"

namespace moebius::cuda {

// Rows of A by index.
struct Gather {
  const char* rows;
  const int32_t* token;
  int32_t chunks;  // of 16 bytes in a row
};

// Where a load goes: a slot's piece, here or in both blocks.
struct SlotLoad {
  uint32_t to, barrier;
  bool both;
  __device__ __forceinline__ void box(const CUtensorMap* map, uint32_t offset, int32_t x, int32_t y, int32_t z) const {
    if (both) {
      tma_load_multicast(to + offset, map, barrier, uint16_t{3}, x, y, z);
    } else {
      tma_load(to + offset, map, barrier, x, y, z);
    }
  }
};

// Both halves of the weights, or this block's half for both blocks.
template <class Op>
__device__ __forceinline__ void load_weights(const typename Op::Params& p, const SlotRing& ring, uint32_t slot,
                                             int32_t k, const RowTile& tile, uint32_t block) {
  const SlotLoad load{ring.b(slot), ring.full(slot), tile.shared};
  if (tile.shared) {
    Op::load_b(p, load, block, k, tile);
  } else {
    Op::load_b(p, load, 0, k, tile);
    Op::load_b(p, load, 1, k, tile);
  }
}

// One thread.
template <class Op>
__device__ void produce(const typename Op::Params& p, const SlotRing& ring, uint32_t block) {
  RowTileWalk walk(p.tiles, block);
  SlotCursor at;
  for (RowTile tile; walk.next(tile);) {
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      mbarrier_arrive_expect(ring.full(at.slot), kSlotBytesA + kSlotBytesB);
      tma_load(ring.a(at.slot), &p.a, ring.full(at.slot), k * kTileK, tile.first_row);
      load_weights<Op>(p, ring, at.slot, k, tile, block);
    }
  }
}

// The producer warpgroup: thread t copies 16-byte chunk t % 8 of rows t / 8 + 16 i; one thread also loads the weights.
template <class Op>
__device__ void produce_gathered(const typename Op::Params& p, const SlotRing& ring, uint32_t block) {
  constexpr int kRows = kTileM / 16;
  const int32_t thread = static_cast<int32_t>(threadIdx.x % 128), chunk = thread % 8;
  const uint32_t place = swizzle_128(static_cast<uint32_t>(thread / 8), static_cast<uint32_t>(chunk));
  RowTileWalk walk(p.tiles, block);
  SlotCursor at;
  for (RowTile tile; walk.next(tile);) {
    uint32_t from[kRows], there = 0;  // in chunks of 16 bytes
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int32_t row = tile.first_row + thread / 8 + 16 * i;
      const bool valid = row < tile.end_row;
      const uint32_t token = valid ? static_cast<uint32_t>(__ldg(p.gather.token + row)) : 0;
      from[i] = token * static_cast<uint32_t>(p.gather.chunks);
      there |= static_cast<uint32_t>(valid) << i;
    }
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      if (thread == 0) {
        mbarrier_arrive_expect(ring.full(at.slot), kSlotBytesB);
        load_weights<Op>(p, ring, at.slot, k, tile, block);
      }
      const int32_t c = k * 8 + chunk;
      const bool inside = c < p.gather.chunks;
      const uint32_t to = ring.a(at.slot) + place;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const bool valid = inside && (there >> i & 1);
        cp_async_16(to + i * 2048, p.gather.rows + (valid ? (static_cast<uint64_t>(from[i]) + c) * 16 : 0), valid);
      }
      mbarrier_arrive_cp_async(ring.full(at.slot));
    }
  }
}

// A tile's 16 rows of a consumer warp, as bf16: words[2 j + i] are columns 8 j + 2 (lane % 4) + {0, 1} of row 8 i +
// lane / 4.
struct HeldRows {
  uint32_t words[64];
  int32_t row, rows;  // the first, and how many there are; none: rows <= 0
  int32_t n;          // of the tile

  __device__ __forceinline__ void take(const float (&acc)[128], const RowTile& tile, int32_t first_row) {
#pragma unroll
    for (int i = 0; i < 64; ++i) words[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    row = first_row;
    rows = tile.end_row - first_row;
    n = tile.n;
  }
};

// fn(std::integral_constant<int, i>) for i in [kFirst, kEnd).
template <int kFirst, int kEnd, class Fn>
__device__ __forceinline__ void for_each_constant(Fn&& fn) {
  if constexpr (kFirst < kEnd) {
    fn(std::integral_constant<int, kFirst>{});
    for_each_constant<kFirst + 1, kEnd>(fn);
  }
}

template <class Op>
__device__ void consume(const typename Op::Params& p, const SlotRing& ring, uint32_t block) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const uint32_t staging = ring.shared + GemmShared::kStaging + warp * kStagingBytesWarp;
  RowTileWalk walk(p.tiles, block);
  SlotCursor at;
  HeldRows held;
  held.rows = 0;
  for (RowTile tile; walk.next(tile);) {
    const int32_t first_row = tile.first_row + static_cast<int32_t>(group) * 64;
    if (first_row >= tile.end_row || tile.n >= p.tiles.across) {
      skip_tile(ring, at, p.num_k);
      continue;
    }
    float acc[128];
    TileProduct<Op::kMajorB, Op::kGather> product{ring, at, group};
    for_each_constant<0, Op::kPieces>([&](auto piece) {
      constexpr int kPiece = decltype(piece)::value;
      if (kPiece < p.num_k) product.step(acc, kPiece == 0);
      if (held.rows > 0) Op::template store_piece<kPiece>(p, held, staging);
    });
    for (int32_t k = Op::kPieces; k < p.num_k; ++k) product.step(acc, false);
    product.finish(acc);
    held.take(acc, tile, first_row + static_cast<int32_t>(warp % 4) * 16);
  }
  if (held.rows > 0) {
    for_each_constant<0, Op::kPieces>(
        [&](auto piece) { Op::template store_piece<decltype(piece)::value>(p, held, staging); });
  }
}

template <class Op>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kGemmThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ typename Op::Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing ring{smem_addr(shared)};
  const uint32_t block = cluster_block_rank();
  if (threadIdx.x == 0) ring.init(Op::kGather ? 129 : 1);
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<kProducerRegisters>();
    if constexpr (Op::kGather) {
      produce_gathered<Op>(p, ring, block);
    } else if (threadIdx.x == 0) {
      produce<Op>(p, ring, block);
    }
  } else {
    more_registers<kConsumerRegisters>();
    consume<Op>(p, ring, block);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

}  // namespace moebius::cuda
