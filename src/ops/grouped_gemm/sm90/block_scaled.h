// The consumers of grouped products of E4M3 operands with scales: A has one for 128 consecutive
// elements of a row, B has one for 128 x 128. A slot is 128 deep, so its product has one scale for
// each row and each half of the columns.
//
// A warpgroup multiplies half a slot at a time, 64 x 128 x 128, and adds it, scaled, to f32 sums in
// registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2). While one warpgroup adds, the tensor
// cores work for the other.
#pragma once

#include "ops/grouped_gemm/sm90/kernel.h"
#include "ops/sm90/wgmma_f8.h"

namespace moebius::cuda {

// Scales in device memory, f32. K' is the number of blocks of 128 along K.
struct BlockScales {
  const float* a;    // [rows of A, K']
  const float* b;    // [experts, blocks of 128 along N, K']
  int32_t blocks_n;  // of B[e]
};

// Where the scales of a tile begin for a thread: of its two rows, and of the two halves of the
// columns. Along K they are neighbours.
struct TileScales {
  const float* row[2];
  const float* column[2];
};

struct NothingElse {
  __device__ __forceinline__ void operator()() const {}
};

// Sets sum to the product of a tile, num_k >= 1 slots. Elements [64 half, 64 half + 64) are the columns
// of a half, as the registers of WgmmaE4m3 have them. Each warp calls meanwhile() once in a slot, while the tensor
// cores multiply.
template <GroupedGemmConfig kConfig, class Meanwhile = NothingElse>
__device__ __forceinline__ void block_scaled_product(float (&sum)[128], const SlotRing<kConfig>& ring,
                                                     SlotCursor<kConfig>& at, uint32_t group, int32_t num_k,
                                                     const TileScales& scales, Meanwhile meanwhile = {}) {
  using Shared = GemmShared<kConfig>;
  static_assert(kConfig.tile_k == 128 && kConfig.element_bytes == 1);
  float rows[2] = {__ldg(scales.row[0]), __ldg(scales.row[1])};
  float columns[2] = {__ldg(scales.column[0]), __ldg(scales.column[1])};
  float acc[64];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0;
  mbarrier_wait(ring.full(at.stage), at.parity);
#pragma unroll 1
  for (int32_t k = 0; k < num_k; ++k) {
    const uint64_t a = wgmma_operand<Major::k>(ring.a(at.stage) + group * (Shared::kSlotBytesA / 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t b = wgmma_operand<Major::k>(ring.b(at.stage) + half * Shared::kHalfBytesB);
      hold_registers(acc);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) WgmmaE4m3::multiply(acc, a + 2 * step, b + 2 * step, step > 0);
      wgmma_commit();
      if (half == 0) meanwhile();
      const float scale[2] = {rows[0] * columns[half], rows[1] * columns[half]};
      const uint32_t slot = at.stage;
      if (half == 1) {  // what the next slot needs, while this one is multiplied
        at.advance();
        if (k + 1 < num_k) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            rows[i] = __ldg(scales.row[i] + k + 1);
            columns[i] = __ldg(scales.column[i] + k + 1);
          }
          mbarrier_wait(ring.full(at.stage), at.parity);
        }
      }
      wgmma_wait<0>();
      hold_registers(acc);
      if (half == 1) ring.release(slot);
#pragma unroll
      for (int i = 0; i < 64; ++i) sum[64 * half + i] = fmaf(acc[i], scale[i / 2 % 2], sum[64 * half + i]);
    }
  }
}

// A consumer warp's own shared memory: kStagingBytesWarp, and a barrier.
struct WarpMemory {
  uint32_t staging, barrier;
};

// The consumers of an Op with `scales`, a BlockScales, in its Params:
//   source_row(p, row)              the row of A that a row of the output reads
//   column_block(p, n, half)        the block of 128 columns of B that half of tile n has
//   begin(p, tile, row, memory)     optional: before the product of a tile
//   store(p, sum, tile, row, memory)   by a consumer warp, whose 16 rows begin at row; there may be none
template <class Op>
__device__ __forceinline__ void consume_block_scaled(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                                     const NoteRing<Op::kConfig>& notes) {
  using Shared = GemmShared<Op::kConfig>;
  static_assert(Op::kMajorB == Major::k);
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
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
    const int32_t warp_row = first_row + static_cast<int32_t>(warp % 4) * 16, last = tile.end_row - 1;
    if constexpr (requires { Op::begin(p, tile, warp_row, memory); }) Op::begin(p, tile, warp_row, memory);
    TileScales scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t row = min(warp_row + static_cast<int32_t>(lane / 4) + 8 * i, last);
      const int32_t block = min(Op::column_block(p, tile.n, i), p.scales.blocks_n - 1);
      scales.row[i] = p.scales.a + static_cast<int64_t>(Op::source_row(p, row)) * p.num_k;
      scales.column[i] = p.scales.b + (static_cast<int64_t>(tile.expert) * p.scales.blocks_n + block) * p.num_k;
    }
    float sum[128];
    block_scaled_product(sum, ring, at, group, p.num_k, scales);
    Op::store(p, sum, tile, warp_row, memory);
  }
}

}  // namespace moebius::cuda
