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

// The scales of a thread's two rows, read one slot ahead.
struct RowScales {
  const float* from[2];
  float next[2];

  __device__ __forceinline__ void begin(const float* a, int64_t row0, int64_t row1, int32_t num_k) {
    from[0] = a + row0 * num_k;
    from[1] = a + row1 * num_k;
    fetch(0);
  }
  __device__ __forceinline__ void fetch(int32_t k) {
    next[0] = __ldg(from[0] + k);
    next[1] = __ldg(from[1] + k);
  }
};

template <class Op>
__device__ __forceinline__ void consume_block_scaled(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring,
                                                     const NoteRing<Op::kConfig>& notes) {
  using Shared = GemmShared<Op::kConfig>;
  static_assert(Op::kConfig.tile_k == 128 && Op::kConfig.element_bytes == 1 && Op::kMajorB == Major::k);
  constexpr bool kFence = Op::kGather && !requires { Op::kCopiesAreFenced; };
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const uint32_t staging = ring.shared + Shared::kStaging + warp * kStagingBytesWarp;
  SlotCursor<Op::kConfig> at;
  for (uint32_t count = 0;; ++count) {
    const TileNote tile = notes.read(count);
    notes.release(count);
    __syncwarp();
    if (tile.n < 0) break;
    const int32_t first_row = tile.first_row + static_cast<int32_t>(group) * 64;
    const int32_t row = first_row + static_cast<int32_t>(warp % 4 * 16 + lane / 4), last = tile.end_row - 1;
    RowScales rows;
    rows.begin(p.scales.a, Op::source_row(p, min(row, last)), Op::source_row(p, min(row + 8, last)), p.num_k);
    const float* columns[2];
    float column_next[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int32_t block = min(Op::column_block(p, tile.n, half), p.scales.blocks_n - 1);
      columns[half] = p.scales.b + (static_cast<int64_t>(tile.expert) * p.scales.blocks_n + block) * p.num_k;
      column_next[half] = __ldg(columns[half]);
    }
    float sum[128], acc[64];
#pragma unroll
    for (int i = 0; i < 128; ++i) sum[i] = 0;
    mbarrier_wait(ring.full(at.stage), at.parity);
    if constexpr (kFence) fence_proxy_async();
#pragma unroll 1
    for (int32_t k = 0; k < p.num_k; ++k) {
      const uint64_t a = wgmma_operand<Major::k>(ring.a(at.stage) + group * (Shared::kSlotBytesA / 2));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint64_t b = wgmma_operand<Major::k>(ring.b(at.stage) + half * Shared::kHalfBytesB);
        hold_registers(acc);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < 4; ++step) WgmmaE4m3::multiply(acc, a + 2 * step, b + 2 * step, step > 0);
        wgmma_commit();
        const float scale[2] = {rows.next[0] * column_next[half], rows.next[1] * column_next[half]};
        const uint32_t slot = at.stage;
        if (half == 1) {  // what the next slot needs, while this one is multiplied
          at.advance();
          if (k + 1 < p.num_k) {
            rows.fetch(k + 1);
            column_next[0] = __ldg(columns[0] + k + 1);
            column_next[1] = __ldg(columns[1] + k + 1);
            mbarrier_wait(ring.full(at.stage), at.parity);
            if constexpr (kFence) fence_proxy_async();
          }
        }
        wgmma_wait<0>();
        hold_registers(acc);
        if (half == 1) ring.release(slot);
#pragma unroll
        for (int i = 0; i < 64; ++i) sum[64 * half + i] = fmaf(acc[i], scale[i / 2 % 2], sum[64 * half + i]);
      }
    }
    Op::store(p, sum, tile, first_row + static_cast<int32_t>(warp % 4) * 16, staging);
  }
}

}  // namespace moebius::cuda
