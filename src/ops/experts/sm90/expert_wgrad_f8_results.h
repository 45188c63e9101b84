// The way of a tile of dw through shared memory in the weight gradient of FP8 operands (expert_wgrad_f8.cu).
//
// A tile has 8 strips of 128 rows by 32 columns, of f32. Strips 0 and 1 have a place in the staging memory. The other
// six take two slots of the ring, like two more K steps of the tile: one strip in place of A, two in place of B.
// If results are added, the copy engine loads the old dw there, and the consumers add it to their sums. It stores the
// new dw from the same memory. So dw is read once and written once. Adding in L2 instead (cp.reduce.async.bulk) took
// 1.12 times as long on an H200 for dW1 of Qwen3-30B-A3B with 2048 rows of each expert, and 1.27 times with half.
//
// A strip is divided among the 8 consumer warps: each has a piece of 16 rows.
#pragma once

#include "ops/cuda/for_each_constant.h"
#include "ops/experts/sm90/expert_wgrad_adder.h"
#include "ops/grouped_gemm/sm90/grouped_gemm.h"

namespace moebius::cuda::sm90 {

// dw [experts, rows, columns] f32, in boxes of 32 columns.
struct WgradResults {
  CUtensorMap strips;  // 128 rows, to load
  CUtensorMap pieces;  // 16 rows, to store
  CUtensorMap parts;   // scratch [parts, 256, 256] of tiles whose K is cut: 16 rows, to store
  bool accumulate;     // false: dw is not read
};

// The place of a tile of 128 x 256 in dw. part >= 0: its results are half of that part in scratch instead, by the
// parity of m. Only kernels with kCutsK have parts.
struct ResultTile {
  int32_t expert, m, n, part;
};

template <bool kCutsK>
__device__ __forceinline__ bool is_part(const ResultTile& tile) {
  return kCutsK && tile.part >= 0;
}
template <bool kCutsK>
__device__ __forceinline__ bool reads_dw(const WgradResults& dw, const ResultTile& tile) {
  return dw.accumulate && !is_part<kCutsK>(tile);
}

// The places of the strips in shared memory.
template <GroupedGemmConfig kConfig>
struct ResultMemory {
  using Shared = GemmShared<kConfig>;
  static constexpr int kStaged = 2, kOfSlot = 3;  // strips in the staging memory, and in a slot
  static constexpr int kSlots = 2;
  static constexpr uint32_t kStripBytes = kConfig.tile_m * 32 * 4;
  static_assert(kStaged + kSlots * kOfSlot == kPieces && kConfig.num_slots > kSlots && kConfig.num_notes >= 1 &&
                kStaged * kStripBytes == Shared::kFull - Shared::kStaging && kStripBytes == Shared::kSlotBytesA &&
                2 * kStripBytes == Shared::kSlotBytesB && 8 * kPieceBytes == kStripBytes);
  SlotRing<kConfig> ring;

  __device__ __forceinline__ uint32_t staged(int i) const { return ring.shared + Shared::kStaging + i * kStripBytes; }
  __device__ __forceinline__ uint32_t in_slot(uint32_t slot, int i) const {
    return i == 0 ? ring.a(slot) : ring.b(slot) + (i - 1) * kStripBytes;
  }
  // The barriers of the staged strips, in place of those of notes, which this kernel does not use.
  __device__ __forceinline__ uint32_t full() const { return ring.shared + Shared::kNoteFull; }
  __device__ __forceinline__ uint32_t empty() const { return ring.shared + Shared::kNoteEmpty; }

  // Called by one thread of the block, before a cluster_sync. slot_arrivals: of those who fill a slot.
  __device__ __forceinline__ void init(uint32_t slot_arrivals) const {
    mbarrier_init(full(), 1);
    mbarrier_init(empty(), Shared::kNumConsumerWarps);
    ring.init(slot_arrivals);
  }
};

// The loading thread's side: per tile one call of each load. Where dw is not read, the barriers pass at once.
template <GroupedGemmConfig kConfig, bool kCutsK>
struct ResultLoads {
  using Memory = ResultMemory<kConfig>;
  const WgradResults& dw;
  Memory memory;
  uint32_t tiles = 0;

  // Reads a strip of the old dw into L2, from which a load then takes it. With one strip in each of the first K steps
  // of a tile, the blocks do not read all of theirs at one time, at the end.
  __device__ __forceinline__ void prefetch(const ResultTile& tile, int strip) const {
    if (reads_dw<kCutsK>(dw, tile) && strip < kPieces)
      tma_prefetch(&dw.strips, tile.n * kConfig.tile_n + 32 * strip, tile.m * kConfig.tile_m, tile.expert);
  }
  // Waits until the staged strips of the tile before have been stored.
  __device__ __forceinline__ void to_staging(const ResultTile& tile) {
    mbarrier_wait(memory.empty(), tiles++ % 2 ^ 1);
    load<Memory::kStaged>(memory.full(), tile, 0, [&](int i) { return memory.staged(i); });
  }
  // After the last K step of the tile.
  __device__ __forceinline__ void to_slots(const ResultTile& tile, SlotCursor<kConfig>& at) const {
    for (int i = 0; i < Memory::kSlots; ++i, at.advance()) {
      memory.ring.wait_empty(at);
      load<Memory::kOfSlot>(memory.ring.full(at.stage), tile, Memory::kStaged + i * Memory::kOfSlot,
                            [&](int strip) { return memory.in_slot(at.stage, strip); });
    }
  }

 private:
  template <int kNum, class To>
  __device__ __forceinline__ void load(uint32_t full, const ResultTile& tile, int first, To to) const {
    if (!reads_dw<kCutsK>(dw, tile)) return mbarrier_arrive(full);
    mbarrier_arrive_expect(full, kNum * Memory::kStripBytes);
    for (int i = 0; i < kNum; ++i)
      tma_load(to(i), &dw.strips, full, tile.n * kConfig.tile_n + 32 * (first + i), tile.m * kConfig.tile_m,
               tile.expert);
  }
};

// Calls body(address, lo, hi) for the 8 pairs of neighbouring columns that a thread has in piece kPiece of its sums
// (the registers of WgmmaE4m3). The piece begins at `at`, with the swizzle of the copy engine. Threads of odd rows take
// the pairs in another order; so 16 lanes access 16 different pairs of banks.
template <int kPiece, class Body>
__device__ __forceinline__ void for_each_pair(uint32_t at, const float (&sum)[128], Body body) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const bool odd = row % 2 == 1;
  const uint32_t chunk = (quad / 2) ^ row ^ (odd ? 4 : 0), first = at + row * 128 + quad % 2 * 8;
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float* of_even = sum + 16 * kPiece + 4 * j + 2 * i;
      const float* of_odd = sum + 16 * kPiece + 4 * (j ^ 2) + 2 * i;
      body(first + i * 1024 + ((chunk ^ (2 * j)) << 4), odd ? of_odd[0] : of_even[0], odd ? of_odd[1] : of_even[1]);
    }
  }
}

// A consumer warp's side. All functions are by the whole warp; its lane 0 issues the copies and waits for them.
template <GroupedGemmConfig kConfig, bool kCutsK>
struct ResultWriter {
  using Memory = ResultMemory<kConfig>;
  const WgradResults& dw;
  Memory memory;
  uint32_t warp;
  uint32_t tiles = 0;
  bool holds = false;  // the last slot of a tile, which the copy engine may still read
  uint32_t held = 0;

  // Gives back the slot that is held, after the copy engine has read it. write() leaves one, so that the first product
  // of the next tile can be issued before that wait.
  __device__ __forceinline__ void release() {
    if (!holds) return;
    if (issues()) tma_wait_read<0>();
    __syncwarp();
    memory.ring.release(held);
    holds = false;
  }
  // Stores the warp's sums of a tile or part, or adds them to dw. Afterwards it holds a slot; none is held before.
  __device__ __forceinline__ void write(const ResultTile& tile, const float (&sum)[128], SlotCursor<kConfig>& at) {
    mbarrier_wait(memory.full(), tiles++ % 2);
    pass<0, Memory::kStaged>(tile, sum, [&](int i) { return memory.staged(i); });
    for_each_constant<0, Memory::kSlots>([&](auto i) {
      constexpr int kI = decltype(i)::value, kFirst = Memory::kStaged + kI * Memory::kOfSlot;
      mbarrier_wait(memory.ring.full(at.stage), at.parity);
      pass<kFirst, Memory::kOfSlot>(tile, sum, [&](int strip) { return memory.in_slot(at.stage, strip); });
      // The copies before the last ones have been read: those of the staged strips, and then of the first slot.
      if (issues()) {
        tma_wait_read<1>();
        if (kI == 0) mbarrier_arrive(memory.empty());
      }
      __syncwarp();
      if (kI > 0) memory.ring.release(held);
      held = at.stage;
      at.advance();
    });
    holds = true;
  }

 private:
  static __device__ __forceinline__ bool issues() { return threadIdx.x % 32 == 0; }

  // Writes the results of strips [kFirst, kFirst + kNum) to the places strip(i), and starts their copies.
  template <int kFirst, int kNum, class Strip>
  __device__ __forceinline__ void pass(const ResultTile& tile, const float (&sum)[128], Strip strip) const {
    const uint32_t own = warp * kPieceBytes;
    float old[kNum][16];
    if (reads_dw<kCutsK>(dw, tile)) {
      for_each_constant<0, kNum>([&](auto i) {
        constexpr int kI = decltype(i)::value;
        int n = 0;
        for_each_pair<kFirst + kI>(strip(kI) + own, sum, [&](uint32_t at, float, float) {
          asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                       : "=f"(old[kI][n]), "=f"(old[kI][n + 1])
                       : "r"(at)
                       : "memory");
          n += 2;
        });
      });
      for_each_constant<0, kNum>([&](auto i) {
        constexpr int kI = decltype(i)::value;
        int n = 0;
        for_each_pair<kFirst + kI>(strip(kI) + own, sum, [&](uint32_t at, float lo, float hi) {
          store_pair(at, old[kI][n] + lo, old[kI][n + 1] + hi);
          n += 2;
        });
      });
    } else {
      for_each_constant<0, kNum>([&](auto i) {
        constexpr int kI = decltype(i)::value;
        for_each_pair<kFirst + kI>(strip(kI) + own, sum, store_pair);
      });
    }
    fence_proxy_async();
    __syncwarp();
    if (!issues()) return;
    const int32_t row = static_cast<int32_t>(warp) * 16;
    for (int i = 0; i < kNum; ++i) {
      const int32_t column = 32 * (kFirst + i);
      if (is_part<kCutsK>(tile)) {
        tma_store(&dw.parts, strip(i) + own, column, tile.m % 2 * kConfig.tile_m + row, tile.part);
      } else {
        tma_store(&dw.pieces, strip(i) + own, tile.n * kConfig.tile_n + column, tile.m * kConfig.tile_m + row,
                  tile.expert);
      }
    }
    tma_commit();
  }
};

}  // namespace moebius::cuda::sm90
