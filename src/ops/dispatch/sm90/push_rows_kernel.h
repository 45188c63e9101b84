// Rows into windows. The bulk copy engine loads a row into shared memory, and stores it to each of its places from
// there. On NVLink it sends more bytes per second than stores of registers do, and a few multiprocessors suffice. Each
// warp has a ring of its own, so warps never wait for each other. The places of a row are looked up while the row before
// it is on its way: otherwise a warp would wait for two reads of memory before each row.
#pragma once

#include "ops/dispatch/cuda/push_rows.h"
#include "ops/sm90/copy.h"
#include "ops/sm90/sync.h"

namespace moebius::cuda {

// kStores: pieces of a warp that the engine may still read while later ones are loaded.
template <int kNumWarps, int kNumPieces, int kNumStores>
struct PushShape {
  static constexpr int kWarps = kNumWarps, kPieces = kNumPieces, kStores = kNumStores;
  static_assert(kStores >= 1 && kStores < kPieces);
  static constexpr uint32_t kPieceBytes = 4096;
  struct Shared {
    uint4 rings[kWarps][kPieces][kPieceBytes / sizeof(uint4)];
    uint64_t loaded[kWarps][kPieces];
  };
};

// REQUIRES: those of push_rows_by_engine().
template <class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1) engine_push_kernel(Push a, Windows to) {
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t ring = smem_addr(&shared.rings[warp]), loaded = smem_addr(&shared.loaded[warp]);
  const auto row_bytes = static_cast<uint32_t>(a.row_bytes);
  if (lane < S::kPieces) mbarrier_init(loaded + 8 * lane, 1);
  fence_mbarrier_init();
  __syncwarp();

  const int64_t first = int64_t{blockIdx.x} * S::kWarps + warp, stride = int64_t{gridDim.x} * S::kWarps;
  int64_t sent = 0;
  const auto look_up = [&](int64_t t) {
    return t < a.num_tokens && lane < a.copies() ? a.place(to, t, lane, sent) : nullptr;
  };
  // The engine next loads the bytes from `ahead_at` on of row `ahead`.
  int64_t ahead = first;
  uint32_t ahead_at = 0;
  const auto load_piece = [&](int slot) {
    if (ahead >= a.num_tokens) return;
    if (lane == 0) {
      const uint32_t bytes = min(S::kPieceBytes, row_bytes - ahead_at), barrier = loaded + 8 * slot;
      mbarrier_arrive_expect(barrier, bytes);
      bulk_load(ring + slot * S::kPieceBytes, a.x + ahead * row_bytes + ahead_at, bytes, barrier);
    }
    ahead_at += S::kPieceBytes;
    if (ahead_at >= row_bytes) ahead_at = 0, ahead += stride;
  };
  for (int slot = 0; slot < S::kPieces; ++slot) load_piece(slot);
  char* next = look_up(first);

  Ring<S::kPieces> now;
  int free = 0, before = 0;  // the next slot that is loaded again; pieces stored before it may be, up to kStores
  for (int64_t t = first; t < a.num_tokens; t += stride) {
    char* const place = next;
    for (uint32_t at = 0; at < row_bytes; at += S::kPieceBytes) {
      mbarrier_wait(loaded + 8 * now.stage, now.parity);
      if (place) bulk_store(place + at, ring + now.stage * S::kPieceBytes, min(S::kPieceBytes, row_bytes - at));
      tma_commit();
      if (at == 0) next = look_up(t + stride);
      if (before < S::kStores) {
        ++before;
      } else {
        tma_wait_read<S::kStores>();
        __syncwarp();
        load_piece(free);
        free = free + 1 == S::kPieces ? 0 : free + 1;
      }
      now.advance();
    }
  }
  tma_wait<0>();
  add_sent(to, sent);
}

}  // namespace moebius::cuda
