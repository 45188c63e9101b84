// The main loop of the grouped products on sm_90a: 128 x 256 output tiles, K in steps of 64 through
// a ring of shared-memory slots. A block is a producer warpgroup, which fills slots, and two
// consumer warpgroups of 64 rows each, which multiply them; two blocks are a cluster that shares
// the weights (sm90/row_tiles.h).
//
// Slot s is full when its bytes have landed (full barrier) and empty when the consumers of BOTH
// blocks have read it (empty barrier), since each block loads half of the shared weights into both.
#pragma once

#include "ops/grouped_gemm/grouped_gemm_config.h"
#include "ops/grouped_gemm/sm90/row_tiles.h"
#include "ops/sm90/sm90.h"

namespace moebius::cuda {

constexpr int kNoteBytes = 32;
constexpr int kMnMajorCols = 64;              // a box of MN-major weights has this many columns: 128 bytes of bf16
constexpr uint32_t kStagingBytesWarp = 4096;  // bytes for the epilogue of each consumer warp

// The shared memory of a config: sizes in bytes, and offsets in the dynamic shared memory, which
// starts at a multiple of 1024.
template <GroupedGemmConfig kConfig>
struct GemmShared {
  static_assert(kConfig.tile_m == 128 && kConfig.tile_n == 256 && kConfig.tile_k * kConfig.element_bytes == 128 &&
                    kConfig.cluster == 2 && kConfig.threads == 384,
                "the main loop multiplies rows of 128 bytes, 64 by 256 of them in each of two consumer warpgroups, in "
                "clusters of two");
  static constexpr int kNumSlots = kConfig.num_slots, kNumNotes = kConfig.num_notes;
  static constexpr int kNumConsumerWarps = 4 * kConfig.num_consumers();
  static constexpr uint32_t kSlotBytesA = kConfig.slot_bytes_a(), kSlotBytesB = kConfig.slot_bytes_b();
  static constexpr uint32_t kHalfBytesB = kSlotBytesB / 2;
  static constexpr uint32_t kA = 0;
  static constexpr uint32_t kB = kA + kNumSlots * kSlotBytesA;
  static constexpr uint32_t kStaging = kB + kNumSlots * kSlotBytesB;
  static constexpr uint32_t kFull = kStaging + kNumConsumerWarps * kStagingBytesWarp;
  static constexpr uint32_t kEmpty = kFull + 8 * kNumSlots;
  static constexpr uint32_t kNoteFull = kEmpty + 8 * kNumSlots;
  static constexpr uint32_t kNoteEmpty = kNoteFull + 8 * kNumNotes;
  static constexpr uint32_t kNotes = kNoteEmpty + 8 * kNumNotes;
  static constexpr uint32_t kBegins = kNotes + kNoteBytes * kNumNotes;
  static constexpr uint32_t kWarp = kBegins + 4 * kConfig.tile_m * kNumNotes;  // a barrier of each consumer warp's own
  static constexpr uint32_t kBytes = kWarp + 8 * kNumConsumerWarps;
};

template <GroupedGemmConfig kConfig>
using SlotCursor = Ring<kConfig.num_slots>;

template <GroupedGemmConfig kConfig>
struct SlotRing {
  using Shared = GemmShared<kConfig>;
  uint32_t shared;  // address of the dynamic shared memory
  __device__ __forceinline__ uint32_t a(uint32_t slot) const {
    return shared + Shared::kA + slot * Shared::kSlotBytesA;
  }
  __device__ __forceinline__ uint32_t b(uint32_t slot) const {
    return shared + Shared::kB + slot * Shared::kSlotBytesB;
  }
  __device__ __forceinline__ uint32_t full(uint32_t slot) const { return shared + Shared::kFull + 8 * slot; }
  __device__ __forceinline__ uint32_t empty(uint32_t slot) const { return shared + Shared::kEmpty + 8 * slot; }

  // Called by one thread of the block, before a cluster_sync.
  __device__ __forceinline__ void init(uint32_t full_arrivals) const {
    for (uint32_t s = 0; s < Shared::kNumSlots; ++s) {
      mbarrier_init(full(s), full_arrivals);
      mbarrier_init(empty(s), 2 * Shared::kNumConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __device__ __forceinline__ void wait_empty(const SlotCursor<kConfig>& at) const {
    mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  // Called by a whole consumer warp; it arrives in both blocks.
  __device__ __forceinline__ void release(uint32_t slot) const {
    const uint32_t lane = threadIdx.x % 32;
    if (lane < 2) mbarrier_arrive_cluster(empty(slot), lane);
  }
};

// The description of a tile for the other warps. Notes have a separate ring, since finding the next tile and its rows
// takes longer than a K step.
struct TileNote {
  int32_t first_row, end_row, n;  // n < 0: there are no more tiles
  int32_t expert, shared;         // as in RowTile
};

template <GroupedGemmConfig kConfig>
struct NoteRing {
  using Shared = GemmShared<kConfig>;
  static constexpr int kNumNotes = Shared::kNumNotes;
  uint32_t shared;

  __device__ __forceinline__ uint32_t note(uint32_t tile) const {
    return shared + Shared::kNotes + tile % kNumNotes * kNoteBytes;
  }
  // For gathered tiles, returns the address of the rows' offsets in chunks of 16 bytes; an offset is 0 if there
  // is no row.
  __device__ __forceinline__ uint32_t begins(uint32_t tile) const {
    return shared + Shared::kBegins + tile % kNumNotes * kConfig.tile_m * 4;
  }
  __device__ __forceinline__ uint32_t full(uint32_t tile) const {
    return shared + Shared::kNoteFull + tile % kNumNotes * 8;
  }
  __device__ __forceinline__ uint32_t empty(uint32_t tile) const {
    return shared + Shared::kNoteEmpty + tile % kNumNotes * 8;
  }

  // Every thread that writes or reads arrives for itself: a barrier then orders the accesses of its
  // own arrivals alone, which tools that look for races can follow. The writer is a warp.
  __device__ __forceinline__ void init(uint32_t reading_threads) const {
    for (uint32_t i = 0; i < kNumNotes; ++i) {
      mbarrier_init(full(i), 32);
      mbarrier_init(empty(i), reading_threads);
    }
  }
  __device__ __forceinline__ void wait_empty(uint32_t tile) const {
    mbarrier_wait(empty(tile), tile / kNumNotes % 2 ^ 1);
  }
  // Called by one lane of the writing warp; then all lanes publish what they wrote.
  __device__ __forceinline__ void write(uint32_t tile, const TileNote& n) const {
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n st.shared.b32 [%0 + 16], %5;" ::"r"(note(tile)),
                 "r"(n.first_row), "r"(n.end_row), "r"(n.n), "r"(n.expert), "r"(n.shared)
                 : "memory");
  }
  __device__ __forceinline__ void publish(uint32_t tile) const { mbarrier_arrive(full(tile)); }
  __device__ __forceinline__ TileNote read(uint32_t tile) const {
    mbarrier_wait(full(tile), tile / kNumNotes % 2);
    TileNote n;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%5];\n ld.shared.b32 %4, [%5 + 16];"
                 : "=&r"(n.first_row), "=&r"(n.end_row), "=&r"(n.n), "=&r"(n.expert), "=&r"(n.shared)
                 : "r"(note(tile))
                 : "memory");
    return n;
  }
  // Called by each reading thread, once it has read the note and the rows.
  __device__ __forceinline__ void release(uint32_t tile) const { mbarrier_arrive(empty(tile)); }
};

// Issues one K step of a consumer warpgroup: rows [64 group, 64 group + 64) of A times all of B.
template <Major kMajorB, GroupedGemmConfig kConfig>
__device__ __forceinline__ void multiply_slot(float (&acc)[128], const SlotRing<kConfig>& ring, uint32_t slot,
                                              uint32_t group, bool accumulate) {
  static_assert(kConfig.element_bytes == 2, "FP8 goes through sm90/block_scaled.h");
  const uint64_t a = wgmma_operand<Major::k>(ring.a(slot) + group * (GemmShared<kConfig>::kSlotBytesA / 2));
  const uint64_t b = wgmma_operand<kMajorB>(ring.b(slot));
  constexpr uint64_t kStepA = 32 >> 4, kStepB = (kMajorB == Major::k ? 32 : 2048) >> 4;
#pragma unroll
  for (int k = 0; k < kConfig.tile_k / 16; ++k) {
    Wgmma<Major::k, kMajorB>::multiply(acc, a + k * kStepA, b + k * kStepB, accumulate || k > 0);
  }
}

// The product of a tile, step by step: acc = sum over the steps. A slot is released once the wgmmas
// of the next one are queued after its own. kFenceA: A was written by cp.async, so each thread
// orders that before its wgmma.
template <GroupedGemmConfig kConfig, Major kMajorB, bool kFenceA>
struct TileProduct {
  const SlotRing<kConfig>& ring;
  SlotCursor<kConfig>& at;
  uint32_t group;
  uint32_t before = 0;

  __device__ __forceinline__ void step(float (&acc)[128], bool first) {
    mbarrier_wait(ring.full(at.stage), at.parity);
    if constexpr (kFenceA) fence_proxy_async();
    hold_registers(acc);
    wgmma_fence();
    multiply_slot<kMajorB>(acc, ring, at.stage, group, !first);
    wgmma_commit();
    if (!first) {
      wgmma_wait<1>();
      ring.release(before);
    }
    before = at.stage;
    at.advance();
  }

  __device__ __forceinline__ void finish(float (&acc)[128]) {
    wgmma_wait<0>();
    hold_registers(acc);
    ring.release(before);
  }
};

// Advances the ring as a TileProduct does, for a warpgroup without rows.
template <GroupedGemmConfig kConfig>
__device__ __forceinline__ void skip_tile(const SlotRing<kConfig>& ring, SlotCursor<kConfig>& at, int num_k) {
  for (int k = 0; k < num_k; ++k, at.advance()) {
    mbarrier_wait(ring.full(at.stage), at.parity);
    __syncwarp();  // two lanes release it for all
    ring.release(at.stage);
  }
}

// 16 rows of 64 columns of bf16 that a warp writes to global memory through its staging memory.
struct WarpBox {
  void* to;              // element (0, 0)
  int64_t row_bytes;     // from one row to the next
  int32_t rows, chunks;  // there are: rows <= 16, chunks of 8 columns <= 8
};

// words[kFirst + 4 j + 2 b + i] are columns 16 j + 8 b + 2 (lane % 4) + {0, 1} of row 8 i + lane / 4.
template <int kFirst, int kNum>
__device__ __forceinline__ void store_box(const WarpBox& box, uint32_t staging, const uint32_t (&words)[kNum]) {
  const uint32_t lane = threadIdx.x % 32;
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) {
    stmatrix_4(staging + swizzle_128(lane % 16, 2 * j + lane / 16), words[kFirst + 4 * j], words[kFirst + 4 * j + 1],
               words[kFirst + 4 * j + 2], words[kFirst + 4 * j + 3]);
  }
  __syncwarp();
  const uint32_t chunk = lane % 8;
#pragma unroll
  for (uint32_t i = 0; i < 4; ++i) {
    const uint32_t row = 4 * i + lane / 8;
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(staging + swizzle_128(row, chunk)));
    if (static_cast<int32_t>(row) < box.rows && static_cast<int32_t>(chunk) < box.chunks) {
      *reinterpret_cast<uint4*>(static_cast<char*>(box.to) + row * box.row_bytes + chunk * 16) = v;
    }
  }
  __syncwarp();
}

}  // namespace moebius::cuda
