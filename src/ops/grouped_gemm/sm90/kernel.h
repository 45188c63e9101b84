// The kernel around the main loop of sm90/grouped_gemm.h. An Op says where operands come from and
// what happens to the product of a tile:
//   kConfig   the GroupedGemmConfig that the kernel is compiled for
//   struct Params { CUtensorMap a, b; Gather gather; RowTiles tiles; int32_t num_k; ... };
//   kGather   rows of A are read by index (cp.async); otherwise by map a, box 64 x 128
//   kMajorB   of the weights' tile
//   load_b(params, map, load, half, k, n, expert)   half of the weights' tile: 128 of its 256 columns, by map b
//   Params::added   optional: an AddedProduct, whose K steps follow those of a and b
//   kPieces, store_piece<i>(params, held, staging)   by a consumer warp: the i-th part of storing its rows of a tile;
//             or consume(params, ring, notes), which replaces the storing described next
//   load_bias(params, tile, bias)   optional: the biases of the tile's columns, as add_bias() takes them
// A tile is stored while the next one is multiplied: its product, rounded to bf16, stays in registers, and K steps
// store a piece each. Only the rounding is done between the products of two tiles. A warpgroup that stores does not
// feed the tensor cores, so the two alternate: one stores in even steps, the other in odd ones.
#pragma once

#include "ops/cuda/for_each_constant.h"
#include "ops/grouped_gemm/sm90/expert_bias.h"
#include "ops/grouped_gemm/sm90/grouped_gemm.h"

namespace moebius::cuda {

// Rows of A by index.
struct Gather {
  const char* rows;
  const int32_t* token;
  int32_t chunks;  // pieces of 16 bytes in a row
};

// A second product that is added to the first in the same sums: rows of another tensor, which are not gathered, by
// other weights of their expert. Its K steps follow those of the first. Nothing is added to products of FP8.
struct AddedProduct {
  CUtensorMap a, b;  // with the boxes of the first
  int32_t num_k;     // its share of Params::num_k; 0: nothing is added
};

template <class Params>
__device__ __forceinline__ int32_t num_added_k(const Params& p) {
  if constexpr (requires { p.added; })
    return p.added.num_k;
  else
    return 0;
}

// The destination of a load: a piece of a slot, in this block or in both.
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

// The warps of the producer warpgroup: one walks the tiles, one loads by TMA, and where Op gathers
// the others copy rows (there the load warp walks the tiles too).
constexpr uint32_t kWalkWarp = 3, kFirstCopyWarp = 1, kNumCopyWarps = 3;

// A whole warp goes to the next tile and announces it, in steps. Each step is short enough that
// loads can continue between them.
template <class Op>
struct Announcer {
  static constexpr int kSteps = 3, kTileM = Op::kConfig.tile_m;
  const typename Op::Params& p;
  const NoteRing<Op::kConfig>& notes;
  RowTileWalk<kTileM> walk;
  RowTile tile{};
  bool more = true;
  uint32_t count = 0;
  uint32_t begins[kTileM / 32] = {};

  __device__ __forceinline__ void step(int i) {
    if (i == 0) more = walk.next(tile);
    if (i == 1) look_up();
    if (i == 2) write();
  }
  __device__ __forceinline__ void look_up() {
    if constexpr (Op::kGather) {
#pragma unroll
      for (int32_t j = 0; j < kTileM / 32; ++j) {
        const int32_t row = tile.first_row + 32 * j + static_cast<int32_t>(threadIdx.x % 32);
        const bool there = more && row < tile.end_row;
        begins[j] = there ? static_cast<uint32_t>(__ldg(p.gather.token + row)) : 0;
      }
    }
  }
  __device__ __forceinline__ void write() {
    const uint32_t lane = threadIdx.x % 32;
    notes.wait_empty(count);
    if constexpr (Op::kGather) {
#pragma unroll
      for (uint32_t j = 0; j < kTileM / 32; ++j) {
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(notes.begins(count) + (32 * j + lane) * 4),
                     "r"(begins[j] * p.gather.chunks)
                     : "memory");
      }
    }
    if (lane == 0) notes.write(count, {tile.first_row, tile.end_row, more ? tile.n : -1, tile.expert, tile.shared});
    notes.publish(count);
    __syncwarp();
    ++count;
  }
};

// Called by one thread: one K step of the TMA loads. It loads both halves of the weights, or this
// block's half for both blocks.
template <class Op, class Tile>
__device__ __forceinline__ void load_step(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                          uint32_t slot, int32_t k, const Tile& tile, uint32_t block) {
  using Shared = GemmShared<Op::kConfig>;
  const SlotLoad weights{ring.b(slot), ring.full(slot), tile.shared != 0};
  const auto load_weights = [&](const CUtensorMap* map, int32_t at_k) {
    if (tile.shared) {
      Op::load_b(p, map, weights, block, at_k, tile.n, tile.expert);
    } else {
      Op::load_b(p, map, weights, 0, at_k, tile.n, tile.expert);
      Op::load_b(p, map, weights, 1, at_k, tile.n, tile.expert);
    }
  };
  if constexpr (requires { p.added; }) {
    const int32_t added_k = k - (p.num_k - p.added.num_k);
    if (added_k >= 0) {
      mbarrier_arrive_expect(weights.barrier, Shared::kSlotBytesA + Shared::kSlotBytesB);
      tma_load(ring.a(slot), &p.added.a, weights.barrier, added_k * Op::kConfig.tile_k, tile.first_row);
      return load_weights(&p.added.b, added_k);
    }
  }
  mbarrier_arrive_expect(weights.barrier, (Op::kGather ? 0 : Shared::kSlotBytesA) + Shared::kSlotBytesB);
  if constexpr (!Op::kGather) tma_load(ring.a(slot), &p.a, weights.barrier, k * Op::kConfig.tile_k, tile.first_row);
  load_weights(&p.b, k);
}

// The load warp if nothing is gathered; one thread runs it.
template <class Op>
__device__ void load(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                     const NoteRing<Op::kConfig>& notes, uint32_t block) {
  SlotCursor<Op::kConfig> at;
  for (uint32_t count = 0;; ++count) {
    const TileNote tile = notes.read(count);
    notes.release(count);
    if (tile.n < 0) return;
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      load_step<Op>(p, ring, at.stage, k, tile, block);
    }
  }
}

template <class Op>
__device__ void walk_tiles(const typename Op::Params& p, const NoteRing<Op::kConfig>& notes, uint32_t block) {
  Announcer<Op> announcer{p, notes, RowTileWalk<Op::kConfig.tile_m>(p.tiles, block)};
  while (announcer.more) {
    for (int i = 0; i < Announcer<Op>::kSteps; ++i) announcer.step(i);
  }
}

// The load warp in kernels with copy warps.
template <class Op>
__device__ void walk_and_load(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                              const NoteRing<Op::kConfig>& notes, uint32_t block) {
  Announcer<Op> announcer{p, notes, RowTileWalk<Op::kConfig.tile_m>(p.tiles, block)};
  SlotCursor<Op::kConfig> at;
  for (int i = 0; i < Announcer<Op>::kSteps; ++i) announcer.step(i);
  while (announcer.more) {
    const RowTile tile = announcer.tile;
    for (int32_t k = 0; k < p.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      if (elect_one()) load_step<Op>(p, ring, at.stage, k, tile, block);
      __syncwarp();
      announcer.step(k);
    }
    for (int32_t i = p.num_k; i < Announcer<Op>::kSteps; ++i) announcer.step(i);
  }
}

// Waits until all but the last kPending groups of this thread's copies are complete, orders them before the wgmmas of
// the threads that wait for the barrier, and arrives there.
template <int kPending>
__device__ __forceinline__ void publish_copied(uint32_t full) {
  cp_async_wait<kPending>();
  fence_proxy_async();
  mbarrier_arrive(full);
}

// The copy warps. 8 lanes copy the 128 bytes of a row, a warp copies 4 rows at once, and the warps
// alternate. This must keep up with the tensor cores, so a copy has few instructions: addresses
// stay in registers, and rows past the expert's end read row 0; their results are not stored.
// cp.async writes through the generic proxy and wgmma reads through the async proxy, so a fence is needed: the
// consumers, or, for elements of 8 bits, these warps before they publish a slot.
template <class Op>
__device__ void copy_rows(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                          const NoteRing<Op::kConfig>& notes) {
  using Shared = GemmShared<Op::kConfig>;
  constexpr int kTileM = Op::kConfig.tile_m;
  constexpr bool kFences = Op::kConfig.element_bytes == 1;
  constexpr int kBehind = 2;  // slots whose copies are in flight before one is published
  constexpr uint32_t kStride = 4 * kNumCopyWarps, kRows = (kTileM + kStride - 1) / kStride;
  static_assert(kStride % 8 == 4, "the swizzle alternates from row to row of a thread");
  const uint32_t warp = threadIdx.x / 32 - kFirstCopyWarp, lane = threadIdx.x % 32, lane_chunk = lane % 8;
  const uint32_t first = 4 * warp + lane / 8;  // each next one is kStride further
  const uint32_t even = swizzle_128(first, lane_chunk), odd = even ^ 64;
  SlotCursor<Op::kConfig> at;
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
    notes.release(count);
    __syncwarp();
    const int32_t num_k = p.num_k - num_added_k(p);
    for (int32_t k = 0; k < num_k; ++k, at.advance()) {
      const bool inside = k * 8 + static_cast<int32_t>(lane_chunk) < p.gather.chunks;
      ring.wait_empty(at);
#pragma unroll
      for (uint32_t i = 0; i < kRows; ++i) {
        if ((i + 1) * kStride <= kTileM || first + kStride * i < kTileM) {
          cp_async_16(ring.a(at.stage) + (i % 2 == 0 ? even : odd) + i * kStride * 128, from[i], inside);
        }
        from[i] += Op::kConfig.tile_k * Op::kConfig.element_bytes;
      }
      if constexpr (kFences) {
        cp_async_commit();
        if (k >= kBehind)
          publish_copied<kBehind>(ring.full((at.stage + Shared::kNumSlots - kBehind) % Shared::kNumSlots));
      } else {
        mbarrier_arrive_cp_async(ring.full(at.stage));
      }
    }
    if constexpr (!kFences) {
      for (int32_t k = num_k; k < p.num_k; ++k, at.advance()) {  // the load warp fills the slots of an added product
        ring.wait_empty(at);
        mbarrier_arrive(ring.full(at.stage));
      }
    }
    if constexpr (kFences) {
      // The last slots of a tile are published before the next tile is waited for.
      for (int32_t back = min(kBehind, p.num_k); back > 0; --back) {
        publish_copied<0>(ring.full((at.stage + Shared::kNumSlots - back) % Shared::kNumSlots));
      }
    }
  }
}

// A tile's 16 rows of a consumer warp, as bf16: words[2 j + i] are columns 8 j + 2 (lane % 4) + {0,
// 1} of row 8 i + lane / 4.
struct HeldRows {
  uint32_t words[64];
  int32_t row, rows;  // the first row, and their number; rows <= 0: there are none
  int32_t n;          // n of the tile

  __device__ __forceinline__ void take(const float (&acc)[128], const TileNote& tile, int32_t first_row) {
#pragma unroll
    for (int i = 0; i < 64; ++i) words[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    row = first_row;
    rows = tile.end_row - first_row;
    n = tile.n;
  }
};

constexpr int kTurns = 2;  // warpgroup g stores after steps that are g modulo this

template <class Op>
__device__ __forceinline__ void consume(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                        const NoteRing<Op::kConfig>& notes) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const uint32_t staging = ring.shared + GemmShared<Op::kConfig>::kStaging + warp * kStagingBytesWarp;
  SlotCursor<Op::kConfig> at;
  HeldRows held;
  held.rows = 0;
  for (uint32_t count = 0;; ++count) {
    const TileNote tile = notes.read(count);
    notes.release(count);
    __syncwarp();
    if (tile.n < 0) break;
    const int32_t first_row = tile.first_row + static_cast<int32_t>(group) * 64;
    if (first_row >= tile.end_row || tile.n >= p.tiles.across) {
      skip_tile(ring, at, p.num_k);
      continue;
    }
    float acc[128];
    TileProduct<Op::kConfig, Op::kMajorB, Op::kGather> product{ring, at, group};
    for_each_constant<0, kTurns * Op::kPieces>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      if (kStep < p.num_k) product.step(acc, kStep == 0);
      if (held.rows > 0 && kStep % kTurns == group % kTurns) {
        Op::template store_piece<kStep / kTurns>(p, held, staging);
      }
    });
    for (int32_t k = kTurns * Op::kPieces; k < p.num_k; ++k) product.step(acc, false);
    uint32_t bias[32];
    constexpr bool kHasBias = requires { Op::load_bias(p, tile, bias); };
    if constexpr (kHasBias) Op::load_bias(p, tile, bias);  // arrives under the last steps
    product.finish(acc);
    if constexpr (kHasBias) add_bias(acc, bias);
    held.take(acc, tile, first_row + static_cast<int32_t>(warp % 4) * 16);
  }
  if (held.rows > 0) {
    for_each_constant<0, Op::kPieces>(
        [&](auto piece) { Op::template store_piece<decltype(piece)::value>(p, held, staging); });
  }
}

template <class Op>
__global__ void __cluster_dims__(Op::kConfig.cluster, 1, 1) __launch_bounds__(Op::kConfig.threads, 1)
    grouped_gemm_kernel(const __grid_constant__ typename Op::Params p) {
  using Shared = GemmShared<Op::kConfig>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing<Op::kConfig> ring{smem_addr(shared)};
  const NoteRing<Op::kConfig> notes{ring.shared};
  const uint32_t block = cluster_block_rank(), warp = threadIdx.x / 32;
  constexpr uint32_t kCopyWarps = Op::kGather ? kNumCopyWarps : 0;
  if (threadIdx.x == 0) {
    notes.init(32 * (Shared::kNumConsumerWarps + kCopyWarps) + (Op::kGather ? 0 : 1));
    for (uint32_t w = 0; w < Shared::kNumConsumerWarps; ++w) mbarrier_init(ring.shared + Shared::kWarp + 8 * w, 1);
    ring.init(32 * kCopyWarps + 1);
  }
  cluster_sync();
  if (warp < 4) {
    fewer_registers<Op::kConfig.producer_registers>();
    if constexpr (Op::kGather) {
      if (warp < kFirstCopyWarp) {
        walk_and_load<Op>(p, ring, notes, block);
      } else {
        copy_rows<Op>(p, ring, notes);
      }
    } else if (warp == kWalkWarp) {
      walk_tiles<Op>(p, notes, block);
    } else if (warp == 0 && elect_one()) {
      load<Op>(p, ring, notes, block);
    }
  } else {
    more_registers<Op::kConfig.consumer_registers>();
    if constexpr (requires { Op::consume(p, ring, notes); }) {
      Op::consume(p, ring, notes);
    } else {
      consume<Op>(p, ring, notes);
    }
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

}  // namespace moebius::cuda
