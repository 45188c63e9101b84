// Copies rows into windows with a few multiprocessors. These keep a link full only if the copies for other ranks
// never wait for this rank's own. So warps are of two kinds. Senders have the bulk copy engine load rows into shared
// memory, and store them to other ranks from there. Owners copy this rank's own rows through registers. Each sender
// has a ring of pieces of rows, and no warp waits for another. The places of rows are looked up while earlier rows
// are copied. A warp that waited for two reads of memory before each row would be slower than its part of the link.
#pragma once

#include "ops/dispatch/cuda/push_rows.h"
#include "ops/sm90/copy.h"
#include "ops/sm90/sync.h"

namespace moebius::cuda {

// kNumStores: pieces of a sender that the engine may still read while later ones are loaded.
template <int kNumSenders, int kNumPieces, int kNumStores, int kNumOwners>
struct PushShape {
  static constexpr int kSenders = kNumSenders, kPieces = kNumPieces, kStores = kNumStores, kOwners = kNumOwners;
  static constexpr int kThreads = (kSenders + kOwners) * 32;
  static_assert(kStores >= 1 && kStores < kPieces);
  static constexpr uint32_t kPieceBytes = 4096;
  struct Shared {
    uint4 rings[kSenders][kPieces][kPieceBytes / sizeof(uint4)];
    uint64_t loaded[kSenders][kPieces];
  };
};

// Sends rows `first`, first + stride, ... to other ranks, with one warp.
template <class S>
__device__ __forceinline__ void send_rows(const Push& a, const Windows& to, uint32_t ring, uint32_t loaded,
                                          int64_t first, int64_t stride) {
  const int lane = threadIdx.x % 32;
  const auto row_bytes = static_cast<uint32_t>(a.row_bytes);
  if (lane < S::kPieces) mbarrier_init(loaded + 8 * lane, 1);
  fence_mbarrier_init();
  __syncwarp();

  // The places of a batch of rows are looked up together: those of each row by `lanes` lanes, a power of two.
  int lanes = 1;
  while (lanes < a.copies()) lanes *= 2;
  const int batch = 32 / lanes, copy = lane & (lanes - 1), row_of_lane = lane / lanes;
  int64_t sent = 0;
  const auto look_up = [&](int64_t begin) {
    const int64_t t = begin + row_of_lane * stride;
    return t < a.num_tokens && copy < a.copies() ? a.place_at_others(to, t, copy, sent) : nullptr;
  };
  // The engine next loads bytes of row `ahead`, from ahead_at on.
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

  char *place = nullptr, *next = look_up(first);
  Ring<S::kPieces> now;
  int free = 0, stores = 0;  // the slot that is loaded next; pieces that were stored, up to kStores
  for (int64_t t = first, row = 0; t < a.num_tokens; t += stride, row = row + 1 == batch ? 0 : row + 1) {
    if (row == 0) place = next, next = look_up(t + batch * stride);
    char* const here = row == row_of_lane ? place : nullptr;
    for (uint32_t at = 0; at < row_bytes; at += S::kPieceBytes) {
      mbarrier_wait(loaded + 8 * now.stage, now.parity);
      if (here) bulk_store(here + at, ring + now.stage * S::kPieceBytes, min(S::kPieceBytes, row_bytes - at));
      tma_commit();
      if (stores < S::kStores) {
        ++stores;
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

// Copies rows `first`, first + stride, ... to this rank's own window, with one warp.
__device__ __forceinline__ void keep_rows(const Push& a, const Windows& to, int64_t first, int64_t stride) {
  constexpr int kAtOnce = 8;  // words that a lane loads before it stores them
  const int lane = threadIdx.x % 32;
  const int64_t words = a.row_bytes / static_cast<int64_t>(sizeof(uint4));
  // A lane has the place of one of 32 rows.
  const auto look_up = [&](int64_t begin) {
    const int64_t t = begin + lane * stride;
    char* here = nullptr;
    for (int copy = 0; t < a.num_tokens && copy < a.copies(); ++copy)
      if (char* const place = a.place_here(to, t, copy)) here = place;
    return here;
  };
  char *place = nullptr, *next = look_up(first);
  int row_of_batch = 0;
  for (int64_t t = first; t < a.num_tokens; t += stride, row_of_batch = (row_of_batch + 1) % 32) {
    if (row_of_batch == 0) place = next, next = look_up(t + 32 * stride);
    auto* const row =
        reinterpret_cast<uint4*>(__shfl_sync(kAllLanes, reinterpret_cast<unsigned long long>(place), row_of_batch));
    if (row == nullptr) continue;
    const auto* x = reinterpret_cast<const uint4*>(a.x + t * a.row_bytes);
    for (int64_t at = lane; at - lane < words; at += 32 * kAtOnce) {
      uint4 word[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) word[i] = fetch_word(x + at + 32 * i, at + 32 * i < words);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (at + 32 * i < words) row[at + 32 * i] = word[i];
    }
  }
}

// REQUIRES: those of push_rows_by_engine().
template <class S>
__global__ void __launch_bounds__(S::kThreads, 1) engine_push_kernel(Push a, Windows to) {
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(memory);
  const int warp = threadIdx.x / 32;
  if (warp < S::kSenders)
    send_rows<S>(a, to, smem_addr(&shared.rings[warp]), smem_addr(&shared.loaded[warp]),
                 int64_t{blockIdx.x} * S::kSenders + warp, int64_t{gridDim.x} * S::kSenders);
  else if (a.of.has(0))
    keep_rows(a, to, int64_t{blockIdx.x} * S::kOwners + warp - S::kSenders, int64_t{gridDim.x} * S::kOwners);
}

}  // namespace moebius::cuda
