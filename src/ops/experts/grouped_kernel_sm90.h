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

// The warps of the producer warpgroup: one walks the tiles and loads by TMA; where Op gathers, the others copy rows.
constexpr uint32_t kFirstCopyWarp = 1, kNumCopyWarps = 3;

// Goes to the next tile and tells the others, by a whole warp. False when there is none.
template <class Op>
__device__ __forceinline__ bool announce(const typename Op::Params& p, RowTileWalk& walk, RowTile& tile,
                                         const NoteRing& notes, uint32_t count) {
  const int32_t lane = threadIdx.x % 32;
  const bool more = walk.next(tile);
  notes.wait_empty(count);
  if constexpr (Op::kGather) {
#pragma unroll
    for (int32_t r = lane; r < kTileM; r += 32) {
      const int32_t row = tile.first_row + r;
      const bool there = more && row < tile.end_row;
      const uint32_t begin = there ? static_cast<uint32_t>(__ldg(p.gather.token + row)) * p.gather.chunks : 0;
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(notes.begins(count) + r * 4), "r"(begin) : "memory");
    }
    __syncwarp();
  }
  if (lane == 0) notes.write(count, {tile.first_row, tile.end_row, more ? tile.n : -1});
  return more;
}

// What TMA loads. Of the weights both halves, or this block's half for both blocks.
template <class Op>
__device__ void load(const typename Op::Params& p, const SlotRing& ring, const NoteRing& notes, uint32_t block) {
  RowTileWalk walk(p.tiles, block);
  RowTile next{};
  SlotCursor at;
  bool more = announce<Op>(p, walk, next, notes, 0);
  for (uint32_t count = 1; more; ++count) {
    const RowTile tile = next;
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      if (elect_one()) {
        const SlotLoad weights{ring.b(at.slot), ring.full(at.slot), tile.shared};
        mbarrier_arrive_expect(weights.barrier, (Op::kGather ? 0 : kSlotBytesA) + kSlotBytesB);
        if constexpr (!Op::kGather) tma_load(ring.a(at.slot), &p.a, weights.barrier, k * kTileK, tile.first_row);
        if (tile.shared) {
          Op::load_b(p, weights, block, k, tile);
        } else {
          Op::load_b(p, weights, 0, k, tile);
          Op::load_b(p, weights, 1, k, tile);
        }
      }
      __syncwarp();
      if (k == 0) more = announce<Op>(p, walk, next, notes, count);
    }
  }
}

// The copy warps: 8 lanes copy the 128 bytes of a row, a warp 4 rows at once, and the warps take turns. This has to
// keep up with the tensor cores, so a copy is one instruction: addresses stay in registers, and rows past the expert's
// end read row 0, which makes rows that are not stored. cp.async writes by way of the generic proxy and wgmma reads by
// the async one: the consumers fence.
template <class Op>
__device__ void copy_rows(const typename Op::Params& p, const SlotRing& ring, const NoteRing& notes) {
  constexpr uint32_t kStride = 4 * kNumCopyWarps, kRows = (kTileM + kStride - 1) / kStride;
  static_assert(kStride % 8 == 4, "the swizzle alternates from row to row of a thread");
  const uint32_t warp = threadIdx.x / 32 - kFirstCopyWarp, lane = threadIdx.x % 32, lane_chunk = lane % 8;
  const uint32_t first = 4 * warp + lane / 8;  // then kStride further each
  const uint32_t even = swizzle_128(first, lane_chunk), odd = even ^ 64;
  SlotCursor at;
  for (uint32_t count = 0;; ++count) {
    if (notes.read(count).n < 0) return;
    const char* from[kRows];
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) {
      uint32_t begin = 0;
      const uint32_t row = first + kStride * i;
      if (row < kTileM) asm volatile("ld.shared.b32 %0, [%1];" : "=r"(begin) : "r"(notes.begins(count) + row * 4));
      from[i] = p.gather.rows + (static_cast<uint64_t>(begin) + lane_chunk) * 16;
    }
    __syncwarp();
    if (lane == 0) notes.release(count);
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      const bool inside = k * 8 + static_cast<int32_t>(lane_chunk) < p.gather.chunks;
      ring.wait_empty(at);
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        if ((i + 1) * kStride <= kTileM || first + kStride * i < kTileM) {
          cp_async_16(ring.a(at.slot) + (i % 2 == 0 ? even : odd) + i * kStride * 128, from[i], inside);
        }
        from[i] += kTileK * 2;
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

  __device__ __forceinline__ void take(const float (&acc)[128], const TileNote& tile, int32_t first_row) {
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
__device__ void consume(const typename Op::Params& p, const SlotRing& ring, const NoteRing& notes) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const uint32_t staging = ring.shared + GemmShared::kStaging + warp * kStagingBytesWarp;
  SlotCursor at;
  HeldRows held;
  held.rows = 0;
  for (uint32_t count = 0;; ++count) {
    const TileNote tile = notes.read(count);
    __syncwarp();
    if (threadIdx.x % 32 == 0) notes.release(count);
    if (tile.n < 0) break;
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
  const NoteRing notes{ring.shared};
  const uint32_t block = cluster_block_rank(), warp = threadIdx.x / 32;
  constexpr uint32_t kCopyWarps = Op::kGather ? kNumCopyWarps : 0;
  if (threadIdx.x == 0) {
    notes.init(kNumConsumerWarps + kCopyWarps);
    ring.init(32 * kCopyWarps + 1);
  }
  cluster_sync();
  if (warp < 4) {
    fewer_registers<kProducerRegisters>();
    if (warp < kFirstCopyWarp) {
      load<Op>(p, ring, notes, block);
    } else if constexpr (Op::kGather) {
      copy_rows<Op>(p, ring, notes);
    }
  } else {
    more_registers<kConsumerRegisters>();
    consume<Op>(p, ring, notes);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

}  // namespace moebius::cuda
