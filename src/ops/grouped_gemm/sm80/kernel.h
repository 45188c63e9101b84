// The grouped products of compute capability 8.0 and later. A block is warps of 64 x 64 output elements
// each; all of them copy to a ring of slots and multiply from it. Copies run num_slots - 1 steps before
// the products, also into the next tile, so that they overlap with the storing of a tile.
//
// An element is the sum over k in order, 16 at a time, in every config. So on one GPU its bits depend neither on
// the config nor on the tile that it is in. The tensor cores of another GPU may round these sums differently.
//
// An Op says where operands come from, and what happens to the product of a tile:
//   kConfig, kCut      the PortableGemmConfig, and the dimension that the offsets cut
//   kInChunks          all rows that the kernel reads or writes are in chunks; else they are of any width (operand.h)
//   kMajorA, kMajorB   the order of each operand in memory
//   struct Params { Tiles tiles; ... };
//   CopyA, CopyB       RowsAlongK or RowsAcrossK
//   units(params)      the units of the rows of A and B, if not kInChunks
//   open(params, a, b, tile)    opens the copies of a tile
//   begin(params, tile, sums)   sets the sums of a warp, before the products are added
//   store(params, tile, sums)   stores the sums of a warp, with the products
#pragma once

#include "ops/cuda/for_each_constant.h"
#include "ops/grouped_gemm/portable_gemm_config.h"
#include "ops/grouped_gemm/sm80/operand.h"
#include "ops/grouped_gemm/sm80/tile_walk.h"

namespace moebius::cuda::sm80 {

// The 64 x 64 sums of a warp: [i][j] is the tile of 16 x 8 at row 16 i and column 8 j.
using WarpSums = float[4][8][4];

template <PortableGemmConfig kConfig>
struct WarpPlace {
  static constexpr uint32_t kAcross = kConfig.tile_n / 64;
  // Returns the warp's first row and column in the tile.
  static __device__ __forceinline__ int32_t row() { return static_cast<int32_t>(threadIdx.x / 32 / kAcross * 64); }
  static __device__ __forceinline__ int32_t col() { return static_cast<int32_t>(threadIdx.x / 32 % kAcross * 64); }
};

// The units (RowWidth) of the rows of A and B.
struct Units {
  uint32_t a, b;
};

// The copies of a block, slot after slot and tile after tile.
template <class Op>
struct Copies {
  static constexpr PortableGemmConfig kConfig = Op::kConfig;
  const typename Op::Params& p;
  TileWalk<Op::kCut, kConfig.tile_m, kConfig.l2_group> walk;
  uint32_t slots;  // their shared address
  typename Op::CopyA a{};
  typename Op::CopyB b{};
  int32_t left = 0;  // depth of the tile that is not copied yet
  bool more = true;
  uint32_t slot = 0;

  // The next slot is filled by open(), copy() of all kParts in order, and close(). The copies of a part are
  // unrolled, so that the compiler can put them between products.
  __device__ __forceinline__ void open() {
    while (more && left <= 0) {
      Tile tile;
      more = walk.next(tile);
      if (more) {
        left = tile.end_k - tile.k;
        Op::open(p, a, b, tile);
      }
    }
  }
  template <int kPart, int kParts>
  __device__ __forceinline__ void copy() const {
    if (!more) return;
    const uint32_t to = slots + slot * (kConfig.slot_bytes_a() + kConfig.slot_bytes_b());
    a.template copy<kPart, kParts>(to);
    b.template copy<kPart, kParts>(to + kConfig.slot_bytes_a());
  }
  // Does the same with rows of any width, and needs registers that the fragments of Products have meanwhile.
  __device__ __forceinline__ void copy_any_width() const {
    if (!more) return;
    const uint32_t to = slots + slot * (kConfig.slot_bytes_a() + kConfig.slot_bytes_b());
    const Units units = Op::units(p);
    a.copy_any_width(to, units.a);
    b.copy_any_width(to + kConfig.slot_bytes_a(), units.b);
  }
  // Closes the group of copies of this slot, which may be empty.
  __device__ __forceinline__ void close() {
    commit_copies();
    a.next();
    b.next();
    left -= kConfig.tile_k;
    slot = slot + 1 == kConfig.num_slots ? 0 : slot + 1;
  }
};

// The products of a warp. The fragments of a step are loaded while those before are multiplied.
template <class Op>
struct Products {
  static constexpr PortableGemmConfig kConfig = Op::kConfig;
  static constexpr int kSteps = kConfig.tile_k / 16;
  static constexpr int kParts = kSteps - 1;  // parts of a slot's copies: one a step, before the wait in the last step
  static constexpr int kRowChunksA = (Op::kMajorA == Major::k ? kConfig.tile_k : kConfig.tile_m) / 8;
  static constexpr int kRowChunksB = (Op::kMajorB == Major::k ? kConfig.tile_k : kConfig.tile_n) / 8;
  static_assert(kSteps % 2 == 0);

  uint32_t slots;
  Fragments<Op::kMajorA, true, kRowChunksA> from_a{static_cast<uint32_t>(WarpPlace<kConfig>::row())};
  Fragments<Op::kMajorB, false, kRowChunksB> from_b{static_cast<uint32_t>(WarpPlace<kConfig>::col())};
  uint32_t slot = 0;
  uint32_t a[2][4][4], b[2][4][4];

  template <int kStep>
  __device__ __forceinline__ void load() {
    const uint32_t at = slots + slot * (kConfig.slot_bytes_a() + kConfig.slot_bytes_b());
    from_a.template load<kStep>(a[kStep % 2], at);
    from_b.template load<kStep>(b[kStep % 2], at + kConfig.slot_bytes_a());
  }
  // Waits until the next slot is full for all threads, and no thread reads the previous one.
  __device__ __forceinline__ void wait() const {
    wait_copies<kConfig.num_slots - 2>();
    __syncthreads();
  }
  __device__ __forceinline__ void multiply_step(WarpSums& sums, int step) const {
    const int from = step % 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
        multiply(sums[i][j], a[from][i], b[from][j / 2][j % 2 * 2], b[from][j / 2][j % 2 * 2 + 1]);
    }
  }
  // Multiplies a slot whose first fragments are loaded. more: the next slot is of the same tile, and its first
  // fragments are loaded too. (Between tiles these registers are needed to store a tile.) With rows of any width, the
  // first fragments are loaded here, after the copies.
  __device__ __forceinline__ void multiply_slot(WarpSums& sums, Copies<Op>& copies, bool more) {
    copies.open();
    if constexpr (!Op::kInChunks) {
      copies.copy_any_width();
      load<0>();
    }
    for_each_constant<0, kSteps>([&](auto step) {
      constexpr int kStep = decltype(step)::value;
      if constexpr (kStep == kSteps - 1) {
        slot = slot + 1 == kConfig.num_slots ? 0 : slot + 1;
        wait();
        if (Op::kInChunks && more) load<0>();
      } else {
        load<kStep + 1>();
        if constexpr (Op::kInChunks) copies.template copy<kStep, kParts>();
        if constexpr (kStep == kParts - 1) copies.close();
      }
      multiply_step(sums, kStep);
    });
  }
};

template <class Op>
__global__ void __launch_bounds__(Op::kConfig.threads(), Op::kConfig.blocks)
    portable_gemm_kernel(const __grid_constant__ typename Op::Params p) {
  constexpr PortableGemmConfig kConfig = Op::kConfig;
  extern __shared__ __align__(128) unsigned char shared[];
  int32_t* offsets =
      reinterpret_cast<int32_t*>(shared + kConfig.num_slots * (kConfig.slot_bytes_a() + kConfig.slot_bytes_b()));
  copy_offsets(offsets, p.tiles);
  using Walk = TileWalk<Op::kCut, kConfig.tile_m, kConfig.l2_group>;
  const uint32_t slots = shared_address(shared);
  Copies<Op> copies{p, Walk(p.tiles, offsets), slots};
  for (int i = 0; i < kConfig.num_slots - 1; ++i) {
    copies.open();
    if constexpr (Op::kInChunks)
      copies.template copy<0, 1>();
    else
      copies.copy_any_width();
    copies.close();
  }
  Products<Op> products{slots};
  products.wait();
  Walk walk(p.tiles, offsets);
  for (Tile tile; walk.next(tile);) {
    WarpSums sums;
    Op::begin(p, tile, sums);
    if (Op::kInChunks && tile.k < tile.end_k) products.template load<0>();
#pragma unroll 1
    for (int32_t k = tile.k; k < tile.end_k; k += kConfig.tile_k)
      products.multiply_slot(sums, copies, k + kConfig.tile_k < tile.end_k);
    Op::store(p, tile, sums);
  }
  wait_copies<0>();
}

}  // namespace moebius::cuda::sm80
