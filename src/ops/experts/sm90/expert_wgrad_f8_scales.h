// The way of block scales through shared memory in the weight gradient of FP8 operands (expert_wgrad_f8.cu).
//
// A slot of the ring has a scale for each of 128 rows of left^T, and one for each half of the columns of the tile. A
// warp copies them while the slot is loaded. So a consumer never waits for device memory: read there, each eighth
// scale of a row is in another sector of 32 bytes, and the first ones of a tile come from L2 or beyond.
#pragma once

#include "ops/grouped_gemm/sm90/block_scaled.h"

namespace moebius::cuda::sm90 {

// Copies 4 bytes from global to shared memory, through L1.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The scales of the slots in shared memory, f32: those of the rows, then the two of the columns.
template <GroupedGemmConfig kConfig>
struct ScaleMemory {
  static constexpr uint32_t kOfColumns = 4 * kConfig.tile_m, kBytesSlot = kOfColumns + 2 * 4;
  static constexpr uint32_t kBytes = kConfig.num_slots * kBytesSlot;
  uint32_t shared;
  __device__ __forceinline__ uint32_t of_slot(uint32_t slot) const { return shared + slot * kBytesSlot; }
};

// The side of the warp that copies: the scales of a tile in device memory, which are neighbours along K.
template <GroupedGemmConfig kConfig>
struct ScaleCopies {
  static constexpr uint32_t kRows = kConfig.tile_m / 32;  // of a lane
  ScaleMemory<kConfig> memory;
  const float* of_row[kRows];
  const float* of_column;  // lanes 0 and 1

  // Copies those of block k to a slot; each lane then arrives at its barrier.
  __device__ __forceinline__ void to_slot(uint32_t slot, uint32_t full, int32_t k) const {
    const uint32_t lane = threadIdx.x % 32, to = memory.of_slot(slot) + 4 * lane;
#pragma unroll
    for (uint32_t i = 0; i < kRows; ++i) cp_async_4(to + 128 * i, of_row[i] + k);
    if (lane < 2) cp_async_4(to + ScaleMemory<kConfig>::kOfColumns, of_column + k);
    mbarrier_arrive_cp_async(full);
  }
};

// A consumer thread's side, whose first row of the tile is `row`.
template <GroupedGemmConfig kConfig>
struct LandedScales : BlockSlotScales {
  uint32_t of_rows, of_columns;  // of slot 0
  __device__ __forceinline__ LandedScales(const ScaleMemory<kConfig>& memory, uint32_t row)
      : of_rows(memory.shared + 4 * row), of_columns(memory.shared + ScaleMemory<kConfig>::kOfColumns) {}

  __device__ __forceinline__ void load(int32_t) const {}
  __device__ __forceinline__ void landed(uint32_t slot) {
    const uint32_t offset = slot * ScaleMemory<kConfig>::kBytesSlot;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[0]) : "r"(of_rows + offset) : "memory");
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(rows[1]) : "r"(of_rows + offset + 8 * 4) : "memory");
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(columns[0]), "=f"(columns[1])
                 : "r"(of_columns + offset)
                 : "memory");
  }
  // All lanes have read the scales of the slot, which the copying warp may then overwrite.
  __device__ __forceinline__ void before_release() const { __syncwarp(); }
};

}  // namespace moebius::cuda::sm90
