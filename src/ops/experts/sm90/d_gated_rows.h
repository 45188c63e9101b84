// The backward of the gated activation on tiles of g, which overlaps with the products of the
// next tiles (sm90/kernel.h).
//
// The product of a tile is kept in registers, rounded, and converted to dh and sa 16 columns at a time, between K steps
// of the next tile. A consumer warp works independently on its 16 rows, with two buffers in shared memory and the copy
// engine. Gate and up of 32 columns are loaded while the previous ones are used. dgate and dup replace them and are
// stored, then sa through the same buffer. (Ordinary loads and stores would use shared memory twice, which the tensor
// cores read at the same time.) The buffers rotate across tiles without a break, so that h of the next tile has arrived
// when its product is complete.
#pragma once

#include <cuda_bf16.h>

#include <type_traits>

#include "ops/experts/sm90/gated_formula.h"
#include "ops/grouped_gemm/sm90/kernel.h"
#include "ops/grouped_gemm/sm90/slots.h"

namespace moebius::cuda {

// Formula is one of gated_formula.h.
template <class Formula>
struct DGatedParams {
  CUtensorMap h, to_dh, to_sa;  // boxes of 16 rows x 32 columns, in the 64-byte swizzle; h and to_dh [R, 2, F]
  __nv_bfloat16 *dh, *sa;
  const float* weight;  // null: 1
  float* partial;       // [column tiles, R]; null: not wanted
  int64_t R;
  int32_t F;
  int32_t steps;  // K steps from one piece to the next; >= 1
  Formula formula;
};

// A tile's 16 rows of a consumer warp.
struct WarpTile {
  int32_t row, rows;  // the first, and how many there are, also more than 16; none: rows <= 0
  int32_t n;          // tile across
};

// A box is 16 rows x 32 columns. A consumer warp has two buffers, each with a box of gate, and then one of up.
constexpr uint32_t kBoxBytes = 16 * 64, kBoxCols = 32;
constexpr int kGradientCols = 256;  // columns of a tile
constexpr int kBoxes = kGradientCols / kBoxCols;
static_assert(4 * kBoxBytes <= kStagingBytesWarp);

// Returns the byte offset of a 16-byte chunk in a box of 64-byte rows, with the 64-byte swizzle of the copy engine: any
// 8 rows of a chunk, and any two rows, are in different banks.
__device__ __forceinline__ uint32_t box_offset(uint32_t row, uint32_t chunk) {
  return row * 64 + ((chunk ^ (row / 2 % 4)) << 4);
}

__device__ __forceinline__ void store_chunk(__nv_bfloat16* to, const uint4& v, bool there) {
  if (there)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ float load_late(const float* from) {  // waited for at its use
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(from));
  return x;
}

// The chunk of 32 columns of box kBox that a lane copies: lane % 4 of row lane / 4, and 8 rows on.
struct LaneChunk {
  uint32_t shared;  // in the staging
  int64_t row, col;
  int32_t rows, cols;  // that are there from it on

  template <class Formula>
  __device__ __forceinline__ LaneChunk(const DGatedParams<Formula>& p, const WarpTile& tile, int box) {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
    shared = box % 2 * 2 * kBoxBytes + box_offset(lane / 4, lane % 4);
    row = tile.row + lane / 4;
    rows = tile.rows - lane / 4;
    col = tile.n * kGradientCols + box * static_cast<int32_t>(kBoxCols) + lane % 4 * 8;
    cols = p.F - static_cast<int32_t>(col);
  }
  __device__ __forceinline__ bool there(int i) const { return 8 * i < rows && cols > 0; }
};

constexpr int kGradientPieces = 2 * kBoxes;

// This takes the place of the next tile if its first box is fetched separately, before its product.
struct NoTile {};

// A consumer warp's shared memory: its buffers, and the barrier of the box in flight.
struct WarpPlaces {
  uint32_t staging, fetched;
};

// Starts to fetch gate and up of a box; one lane calls it. Rows and columns that do not exist arrive as other ones or
// as zeros.
template <class Formula>
__device__ __forceinline__ void fetch_box(const DGatedParams<Formula>& p, const WarpTile& tile, int box,
                                          const WarpPlaces& at) {
  const int32_t col = tile.n * kGradientCols + box * static_cast<int32_t>(kBoxCols);
  const uint32_t to = at.staging + box % 2 * 2 * kBoxBytes;
  mbarrier_arrive_expect(at.fetched, 2 * kBoxBytes);
  tma_load(to, &p.h, at.fetched, col, 0, tile.row);
  tma_load(to + kBoxBytes, &p.h, at.fetched, col, 1, tile.row);
}

// A tile's g, which becomes sa, and the other inputs of the backward of the tile. words[2 j + i] are
// columns 8 j + 2 (lane % 4) + {0, 1} of row 8 i + lane / 4.
template <class Formula>
struct HeldGradient {
  using Params = DGatedParams<Formula>;
  uint32_t words[2 * kGradientCols / 8];
  WarpTile tile{};
  float weight[2];   // of the rows
  float product[2];  // <g, a> of the rows, of this thread's columns

  __device__ __forceinline__ void take(const Params& p, const float (&acc)[128], const WarpTile& of) {
    const int32_t row = static_cast<int32_t>(threadIdx.x % 32 / 4);
    tile = of;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      weight[i] = 1;
      if (p.weight != nullptr && row + 8 * i < of.rows) weight[i] = load_late(p.weight + of.row + row + 8 * i);
      product[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < 64; ++i) words[i] = pack_bf16(acc[2 * i], acc[2 * i + 1]);
  }

  // Processes 8 columns of g. Gate and up are in their box, and are replaced by dgate and dup.
  template <int kUnit>
  __device__ __forceinline__ void backward(const Formula& f, uint32_t staging) {
    constexpr uint32_t kBox = kUnit / 4 % 2 * 2 * kBoxBytes, kChunk = kUnit % 4;
    const uint32_t lane = threadIdx.x % 32;
    const uint32_t at = ((staging + lane / 16 * kBoxBytes + box_offset(lane % 16, 0)) ^ (kChunk << 4)) + kBox;
    uint32_t gate0, gate8, up0, up8;
    ldmatrix_4(at, gate0, gate8, up0, up8);
    float z[4] = {f.logit(low_bf16(gate0)), f.logit(high_bf16(gate0)), f.logit(low_bf16(gate8)),
                  f.logit(high_bf16(gate8))};
    approximate_sigmoids(z);
    gated_backward(f, gate0, up0, words[2 * kUnit], z[0], z[1], weight[0], product[0]);
    gated_backward(f, gate8, up8, words[2 * kUnit + 1], z[2], z[3], weight[1], product[1]);
    stmatrix_4(at, gate0, gate8, up0, up8);
  }

  // has: the tile has rows, and the box columns. whole: all 16 rows exist, so the copy engine
  // can store them.
  template <int kBox>
  __device__ __forceinline__ bool has(const Params& p) const {
    return tile.rows > 0 && tile.n * kGradientCols + kBox * static_cast<int32_t>(kBoxCols) < p.F;
  }
  __device__ __forceinline__ bool whole() const { return tile.rows >= 16; }
  template <int kBox>
  __device__ __forceinline__ static uint32_t buffer(uint32_t staging) {
    return staging + kBox % 2 * 2 * kBoxBytes;
  }

  // Stores dgate and dup of a box. The whole warp calls it and the next functions.
  template <int kBox>
  __device__ __forceinline__ void store_dh(const Params& p, uint32_t staging) const {
    const uint32_t from = buffer<kBox>(staging);
    if (whole()) {
      const int32_t col = tile.n * kGradientCols + kBox * static_cast<int32_t>(kBoxCols);
      fence_proxy_async();
      __syncwarp();
      if (threadIdx.x % 32 == 0) {
        tma_store(&p.to_dh, from, col, 0, tile.row);
        tma_store(&p.to_dh, from + kBoxBytes, col, 1, tile.row);
        tma_commit();
      }
      return;
    }
    __syncwarp();
    const LaneChunk at(p, tile, kBox);
    __nv_bfloat16* dh = p.dh + 2 * at.row * p.F + at.col;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t chunk = staging + at.shared + i * 512;
      store_chunk(dh + i * 16 * p.F, load_shared(chunk), at.there(i));
      store_chunk(dh + (i * 16 + 1) * p.F, load_shared(chunk + kBoxBytes), at.there(i));
    }
  }

  // Stores sa through the buffer of dgate, which has been stored already.
  template <int kBox>
  __device__ __forceinline__ void store_sa(const Params& p, uint32_t staging) const {
    constexpr int kWords = 8 * kBox;
    const uint32_t lane = threadIdx.x % 32, to = buffer<kBox>(staging);
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      stmatrix_4(to + box_offset(lane % 16, 2 * j + lane / 16), words[kWords + 4 * j], words[kWords + 4 * j + 1],
                 words[kWords + 4 * j + 2], words[kWords + 4 * j + 3]);
    }
    if (whole()) {
      fence_proxy_async();
      __syncwarp();
      if (lane == 0) {
        tma_store(&p.to_sa, to, tile.n * kGradientCols + kBox * static_cast<int32_t>(kBoxCols), tile.row);
        tma_commit();
      }
      return;
    }
    __syncwarp();
    const LaneChunk at(p, tile, kBox);
    __nv_bfloat16* sa = p.sa + at.row * p.F + at.col;
#pragma unroll
    for (int i = 0; i < 2; ++i) store_chunk(sa + i * 8 * p.F, load_shared(staging + at.shared + i * 512), at.there(i));
    fence_proxy_async();  // what has been read here is filled by the copy engine
  }

  // Waits until the stores of this warp have left shared memory.
  __device__ __forceinline__ static void wait_stores() {
    if (threadIdx.x % 32 == 0) tma_wait_read<0>();
    __syncwarp();
  }

  __device__ __forceinline__ void store_products(const Params& p) const {
    const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum = product[i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      const int32_t row = lane / 4 + 8 * i;
      if (p.partial != nullptr && lane % 4 == 0 && row < tile.rows) p.partial[tile.n * p.R + tile.row + row] = sum;
    }
  }

  // Processes half a box, 16 columns. During the first half, sa of the previous box is stored; during the second, that
  // box is filled again with the columns after this one, of this tile or the next.
  template <int kPiece, class Next>
  __device__ __forceinline__ void piece(const Params& p, const Next& next, const WarpPlaces& at) {
    constexpr int kBox = kPiece / 2, kFirst = 2 * kPiece;
    if constexpr (kPiece % 2 == 0) mbarrier_wait(at.fetched, kBox % 2);
    if (has<kBox>(p)) {
      backward<kFirst>(p.formula, at.staging);
      backward<kFirst + 1>(p.formula, at.staging);
    }
    if constexpr (kPiece % 2 == 0) {
      if constexpr (kBox > 0) finish_box<kBox - 1>(p, at.staging);
    } else {
      wait_stores();
      if constexpr (kBox + 1 < kBoxes || !std::is_same_v<Next, NoTile>) {
        const auto following = [&] {
          if constexpr (kBox + 1 < kBoxes)
            return tile;
          else
            return next();
        };
        if (threadIdx.x % 32 == 0) fetch_box(p, following(), (kBox + 1) % kBoxes, at);
      }
      if (has<kBox>(p)) store_dh<kBox>(p, at.staging);
    }
  }
  template <int kBox>
  __device__ __forceinline__ void finish_box(const Params& p, uint32_t staging) const {
    wait_stores();
    if (has<kBox>(p)) store_sa<kBox>(p, staging);
  }
  // Called after the last piece.
  __device__ __forceinline__ void finish(const Params& p, const WarpPlaces& at) const {
    finish_box<kBoxes - 1>(p, at.staging);
    store_products(p);
  }
};

// The steps of TileProduct with fewer registers: everything follows from the number of steps.
template <GroupedGemmConfig kConfig, Major kMajorB, bool kFenceA>
struct CountedProduct {
  static constexpr int kNumSlots = kConfig.num_slots;
  const SlotRing<kConfig>& ring;
  uint32_t group, count = 0;

  __device__ __forceinline__ void step(float (&acc)[128], bool first) {
    const uint32_t slot = count % kNumSlots;
    mbarrier_wait(ring.full(slot), count / kNumSlots % 2);
    if constexpr (kFenceA) fence_proxy_async();
    hold_registers(acc);
    wgmma_fence();
    multiply_slot<kMajorB>(acc, ring, slot, group, !first);
    wgmma_commit();
    if (!first) {
      wgmma_wait<1>();
      ring.release((count - 1) % kNumSlots);
    }
    ++count;
  }
  __device__ __forceinline__ void finish(float (&acc)[128]) {
    wgmma_wait<0>();
    hold_registers(acc);
    ring.release((count - 1) % kNumSlots);
  }
  __device__ __forceinline__ void skip(int32_t num_k) {
    for (int32_t k = 0; k < num_k; ++k, ++count) {
      mbarrier_wait(ring.full(count % kNumSlots), count / kNumSlots % 2);
      __syncwarp();
      ring.release(count % kNumSlots);
    }
  }
};

// The consumers of a kernel whose tiles go through a HeldGradient. The pieces of one come every
// p.act.steps K steps of the next tile, those of the second warpgroup half way between those of the
// first: a warpgroup in a piece does not feed the tensor cores.
template <class Op>
__device__ __forceinline__ void consume_gradient(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                                 const NoteRing<Op::kConfig>& notes) {
  static_assert(Op::kConfig.tile_n == kGradientCols);
  using Shared = GemmShared<Op::kConfig>;
  const uint32_t group = sm90::uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 - 4;
  const WarpPlaces places{ring.shared + Shared::kStaging + warp * kStagingBytesWarp,
                          ring.shared + Shared::kWarp + 8 * warp};
  const int32_t warp_row = static_cast<int32_t>(warp) * 16;
  const int32_t first = Op::kLead + static_cast<int32_t>(group) * (p.act.steps / 2);
  CountedProduct<Op::kConfig, Op::kMajorB, Op::kGather> product{ring, group};
  HeldGradient<decltype(p.act.formula)> held;
  if (threadIdx.x % 32 == 0) mbarrier_arrive(places.fetched);  // the first box of no tile
  for (uint32_t count = 0;; ++count) {
    const TileNote note = notes.read(count);
    if (note.n < 0) break;
    if (note.first_row + static_cast<int32_t>(group) * 64 >= note.end_row || note.n >= p.tiles.across) {
      product.skip(p.num_k);
      notes.release(count);
      continue;
    }
    const auto next = [&] {  // read from the note again, since few registers are left
      const TileNote again = notes.read(count);
      const int32_t row = again.first_row + warp_row;
      return WarpTile{row, again.end_row - row, again.n};
    };
    float acc[128];
    product.step(acc, true);
    int32_t k = 1;
    for_each_constant<0, kGradientPieces>([&](auto piece) {
      constexpr int kPiece = decltype(piece)::value;
#pragma unroll 1
      for (const int32_t end = min(p.num_k, first + kPiece * p.act.steps); k < end; ++k) product.step(acc, false);
      held.template piece<kPiece>(p.act, next, places);
    });
    held.finish(p.act, places);
#pragma unroll 1
    for (; k < p.num_k; ++k) product.step(acc, false);
    product.finish(acc);
    held.take(p.act, acc, next());
    notes.release(count);
    __syncwarp();
  }
  const auto none = [] { return WarpTile{}; };
  for_each_constant<0, kGradientPieces>(
      [&](auto piece) { held.template piece<decltype(piece)::value>(p.act, none, places); });
  held.finish(p.act, places);
  mbarrier_wait(places.fetched, 0);  // no copy may arrive after the block has ended
  tma_wait<0>();
}

}  // namespace moebius::cuda
