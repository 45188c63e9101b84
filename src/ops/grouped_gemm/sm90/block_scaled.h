// The consumers of grouped products of FP8 operands with scales. A slot is 128 deep.
//
//   BlockScales    A has a scale for 128 consecutive elements of a row, B one for 128 x 128. So the product of a slot
//                  has one scale for each row and each half of the columns. Both are E4M3.
//   TensorScales   A has one scale, and each B[e] has one. They are applied to the whole product. A is E4M3 or E5M2.
//
// The two scales are multiplied first, so f32 must hold their product: at 2^-150 it becomes zero, and at 2^128 infinite
// (docs/design/quantised-products.md).
//
// A warpgroup multiplies half a slot at a time, 64 x 128 x 128, and adds it, scaled, to f32 sums in
// registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). While one warpgroup adds, the tensor
// cores work for the other.
#pragma once

#include <type_traits>

#include "ops/grouped_gemm/sm90/kernel.h"
#include "ops/sm90/wgmma_f8.h"

namespace moebius::cuda {

// Scales in device memory, f32. K' is the number of blocks of 128 along K.
struct BlockScales {
  const float* a;    // [rows of A, K']
  const float* b;    // [experts, blocks of 128 along N, K']
  int32_t blocks_n;  // of B[e]
};

// Multiply: WgmmaE4m3 or WgmmaE5m2, by the elements of A.
template <class MultiplyA>
struct TensorScales {
  const float* a;  // [1]
  const float* b;  // [experts]
};

// The scales of a slot of a product with BlockScales, for a thread: those of its two rows, and one for each half of
// the columns.
struct BlockSlotScales {
  using Multiply = WgmmaE4m3;
  // Those of half a slot.
  struct Half {
    float of_row[2];
    __device__ __forceinline__ float added(float sum, float product, int i) const {
      return fmaf(product, of_row[i / 2 % 2], sum);
    }
  };

  float rows[2], columns[2];

  __device__ __forceinline__ Half of_half(int half) const { return {rows[0] * columns[half], rows[1] * columns[half]}; }
  __device__ __forceinline__ void finish(float (&)[128]) const {}
};

// Those of a tile in device memory. Along K they are neighbours.
struct BlockTileScales : BlockSlotScales {
  const float* row[2];
  const float* column[2];

  __device__ __forceinline__ void load(int32_t k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = __ldg(row[i] + k);
      columns[i] = __ldg(column[i] + k);
    }
  }
  __device__ __forceinline__ void landed(uint32_t) const {}
  __device__ __forceinline__ void before_release() const {}
};

// The same with 32-bit places in a and b: kernels that gather rows spill fewer registers with these.
struct GatheredTileScales : BlockSlotScales {
  const float *a, *b;
  uint32_t row[2], column[2];

  __device__ __forceinline__ void load(int32_t k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      rows[i] = __ldg(a + (row[i] + static_cast<uint32_t>(k)));
      columns[i] = __ldg(b + (column[i] + static_cast<uint32_t>(k)));
    }
  }
  __device__ __forceinline__ void landed(uint32_t) const {}
  __device__ __forceinline__ void before_release() const {}
};

// The same of a product with TensorScales.
template <class MultiplyA>
struct TensorTileScales {
  using Multiply = MultiplyA;
  struct Half {
    __device__ __forceinline__ float added(float sum, float product, int) const { return sum + product; }
  };

  float scale;  // of A times that of B

  __device__ __forceinline__ void load(int32_t) const {}
  __device__ __forceinline__ void landed(uint32_t) const {}
  __device__ __forceinline__ void before_release() const {}
  __device__ __forceinline__ Half of_half(int) const { return {}; }
  __device__ __forceinline__ void finish(float (&sum)[128]) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) sum[i] *= scale;
  }
};

struct NothingElse {
  __device__ __forceinline__ void operator()() const {}
};

constexpr int32_t kStepsOfSlot = 4;  // of 32 along K

// Sets sum to the product of a tile, num_k >= 1 slots. Elements [64 half, 64 half + 64) are the columns
// of a half, as the registers of WgmmaE4m3 have them. Each warp calls meanwhile() once in a slot, while the tensor
// cores multiply. kCutsLast: of the last slot only last_steps are multiplied, 1 to kStepsOfSlot; the rest is zeros.
// scales.load(k) comes before a slot has landed, scales.landed(slot) after it, and scales.before_release() before the
// warp gives the slot back.
template <bool kCutsLast = false, GroupedGemmConfig kConfig, class Scales, class Meanwhile = NothingElse>
__device__ __forceinline__ void scaled_product(float (&sum)[128], const SlotRing<kConfig>& ring,
                                               SlotCursor<kConfig>& at, uint32_t group, int32_t num_k, Scales scales,
                                               Meanwhile meanwhile = {}, int32_t last_steps = kStepsOfSlot) {
  using Shared = GemmShared<kConfig>;
  static_assert(kConfig.tile_k == 32 * kStepsOfSlot && kConfig.element_bytes == 1);
  scales.load(0);
  float acc[64];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0;
  mbarrier_wait(ring.full(at.stage), at.parity);
  scales.landed(at.stage);
#pragma unroll 1
  for (int32_t k = 0; k < num_k; ++k) {
    const int32_t steps = kCutsLast && k + 1 == num_k ? last_steps : kStepsOfSlot;
    const uint64_t a = wgmma_operand<Major::k>(ring.a(at.stage) + group * (Shared::kSlotBytesA / 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t b = wgmma_operand<Major::k>(ring.b(at.stage) + half * Shared::kHalfBytesB);
      hold_registers(acc);
      // Predicates would end the chain after each step.
      const auto chain = [&](auto num) {
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < num.value; ++step)
          Scales::Multiply::multiply(acc, a + 2 * step, b + 2 * step, /*accumulate=*/step > 0);
        wgmma_commit();
      };
      if (!kCutsLast || steps == 4)
        chain(std::integral_constant<int, 4>{});
      else if (steps == 3)
        chain(std::integral_constant<int, 3>{});
      else if (steps == 2)
        chain(std::integral_constant<int, 2>{});
      else
        chain(std::integral_constant<int, 1>{});
      if (half == 0) meanwhile();
      const auto of_half = scales.of_half(half);
      const uint32_t slot = at.stage;
      if (half == 1) {  // what the next slot needs, while this one is multiplied
        at.advance();
        if (k + 1 < num_k) {
          scales.load(k + 1);
          mbarrier_wait(ring.full(at.stage), at.parity);
          scales.landed(at.stage);
        }
      }
      wgmma_wait<0>();
      hold_registers(acc);
      if (half == 1) {
        scales.before_release();
        ring.release(slot);
      }
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[64 * half + i] = of_half.added(sum[64 * half + i], acc[i], i);
    }
  }
  scales.finish(sum);
}

// A consumer warp's own shared memory: kStagingBytesWarp, and a barrier.
struct WarpMemory {
  uint32_t staging, barrier;
};

// The scales of a tile for a thread of a warp whose 16 rows begin at warp_row; of an Op as consume_scaled() has it.
template <class Op>
__device__ __forceinline__ auto tile_scales(const typename Op::Params& p, const BlockScales& all, const TileNote& tile,
                                            int32_t warp_row) {
  std::conditional_t<Op::kGather, GatheredTileScales, BlockTileScales> scales;
  if constexpr (Op::kGather) {
    scales.a = all.a;
    scales.b = all.b;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int32_t row = min(warp_row + static_cast<int32_t>(threadIdx.x % 32 / 4) + 8 * i, tile.end_row - 1);
    const int32_t block = min(Op::column_block(p, tile.n, i), all.blocks_n - 1);
    const int32_t source = Op::source_row(p, row);
    if constexpr (Op::kGather) {
      scales.row[i] = static_cast<uint32_t>(source) * p.num_k;
      scales.column[i] = static_cast<uint32_t>(tile.expert * all.blocks_n + block) * p.num_k;
    } else {
      scales.row[i] = all.a + static_cast<int64_t>(source) * p.num_k;
      scales.column[i] = all.b + (static_cast<int64_t>(tile.expert) * all.blocks_n + block) * p.num_k;
    }
  }
  return scales;
}
template <class Op, class MultiplyA>
__device__ __forceinline__ TensorTileScales<MultiplyA> tile_scales(const typename Op::Params&,
                                                                   const TensorScales<MultiplyA>& all,
                                                                   const TileNote& tile, int32_t) {
  return {__ldg(all.a) * __ldg(all.b + tile.expert)};
}

// The consumers of an Op with `scales`, BlockScales or TensorScales, in its Params:
//   source_row(p, row)              the row of A that a row of the output reads
//   column_block(p, n, half)        the block of 128 columns of B that half of tile n has
//   begin(p, tile, row, memory)     optional: before the product of a tile
//   store(p, sum, tile, row, memory)   by a consumer warp, whose 16 rows begin at row; there may be none
template <class Op>
__device__ __forceinline__ void consume_scaled(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                               const NoteRing<Op::kConfig>& notes) {
  using Shared = GemmShared<Op::kConfig>;
  static_assert(Op::kMajorB == Major::k);
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4;
  const WarpMemory memory{ring.shared + Shared::kStaging + warp * kStagingBytesWarp,
                          ring.shared + Shared::kWarp + 8 * warp};
  SlotCursor<Op::kConfig> at;
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
    const int32_t warp_row = first_row + static_cast<int32_t>(warp % 4) * 16;
    if constexpr (requires { Op::begin(p, tile, warp_row, memory); }) Op::begin(p, tile, warp_row, memory);
    float sum[128];
    scaled_product(sum, ring, at, group, p.num_k, tile_scales<Op>(p, p.scales, tile, warp_row));
    Op::store(p, sum, tile, warp_row, memory);
  }
}

}  // namespace moebius::cuda
