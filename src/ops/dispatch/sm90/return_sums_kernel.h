// Sums the experts' rows of each token, and writes the sums to the windows of the tokens' ranks. A warp computes one
// sum at a time. The bulk copy engine loads pieces of the rows that it adds into a ring in shared memory. The engine
// is ahead of the sums by the length of the ring, also where the next sum begins. A few multiprocessors read memory
// fast only if each has many bytes in flight.
#pragma once

#include "ops/dispatch/cuda/windows.h"
#include "ops/sm90/copy.h"
#include "ops/sm90/sync.h"

namespace moebius::cuda {

// kNumVectors: words of 16 bytes of a lane in a piece.
template <int kNumWarps, int kNumPieces, int kNumVectors>
struct SumShape {
  static constexpr int kWarps = kNumWarps, kPieces = kNumPieces, kVectors = kNumVectors;
  static_assert(kPieces >= 2);
  static constexpr uint32_t kPieceBytes = kVectors * 32 * sizeof(uint4);
  // The ring of a warp. A piece is of one row of y.
  struct Ring {
    uint4 words[kPieces][kVectors][32];
  };
  struct Shared {
    Ring rings[kWarps];
    uint64_t loaded[kWarps][kPieces];
    float weights[kWarps][kPieces];  // the weight of a piece's row
  };
};

// REQUIRES: at most 32 pairs of a row; rows of y and of the windows begin at multiples of 16 bytes.
template <class T, class S>
__global__ void __launch_bounds__(S::kWarps * 32, 1)
    pipelined_sums_kernel(const char* y, uint32_t row_bytes, Return a, Windows to) {
  constexpr int kNum = kPerVector<T>, kVectors = S::kVectors;
  extern __shared__ __align__(128) char memory[];
  auto& shared = *reinterpret_cast<typename S::Shared*>(memory);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t words = smem_addr(&shared.rings[warp]), loaded = smem_addr(&shared.loaded[warp]);
  float* const weights = shared.weights[warp];
  if (lane < S::kPieces) mbarrier_init(loaded + 8 * lane, 1);
  fence_mbarrier_init();
  __syncwarp();

  const ReturnOrder order(a, to);
  const uint32_t num_rows = order.num_rows(), first = blockIdx.x * S::kWarps + warp, stride = gridDim.x * S::kWarps;
  // The pair that this lane looks up: its row of y, -1 without one, and its weight.
  struct Pair {
    int32_t row = -1;
    float weight = 1;
  };
  const auto pair_of = [&](uint32_t turn) {
    Pair pair;
    if (turn >= num_rows || lane >= a.num_pairs) return pair;
    const int64_t i = int64_t{order.row(turn)} * a.num_pairs + lane;
    pair.row = a.pair_row_NL[i];
    if (a.weight_NL) pair.weight = a.weight_NL[i];
    return pair;
  };
  // The engine next loads bytes for the sum `ahead`, from ahead_at on, of the rows of the pairs in ahead_left.
  uint32_t ahead = first, ahead_at = 0;
  Pair pair = pair_of(ahead), next = pair_of(ahead + stride);
  uint32_t ahead_all = __ballot_sync(kAllLanes, pair.row >= 0), ahead_left = ahead_all;
  const char* from = y + static_cast<uint64_t>(static_cast<uint32_t>(pair.row)) * row_bytes;
  const auto next_row = [&] {  // skips rows without pairs, for which nothing is loaded
    while (ahead_left == 0 && ahead < num_rows) {
      ahead += stride;
      pair = next;
      next = pair_of(ahead + stride);
      ahead_left = ahead_all = __ballot_sync(kAllLanes, pair.row >= 0);
      from = y + static_cast<uint64_t>(static_cast<uint32_t>(pair.row)) * row_bytes;
    }
  };
  const auto load_piece = [&](int slot) {
    if (ahead_left == 0) return;
    if (lane == __ffs(ahead_left) - 1) {
      const uint32_t bytes = min(S::kPieceBytes, row_bytes - ahead_at), barrier = loaded + 8 * slot;
      weights[slot] = pair.weight;
      mbarrier_arrive_expect(barrier, bytes);
      bulk_load(words + slot * S::kPieceBytes, from + ahead_at, bytes, barrier);
    }
    ahead_left &= ahead_left - 1;
    if (ahead_left != 0) return;
    ahead_at += S::kPieceBytes;
    if (ahead_at < row_bytes) {
      ahead_left = ahead_all;
    } else {
      ahead_at = 0;
      next_row();
    }
  };
  next_row();
  for (int slot = 0; slot < S::kPieces; ++slot) load_piece(slot);
  __syncwarp();

  Ring<S::kPieces> ring;
  int64_t sent = 0;
  for (uint32_t turn = first; turn < num_rows; turn += stride) {
    const int32_t n = order.row(turn);
    const int source = source_of(a, to, n);
    char* out = to.array(source) + int64_t{a.back_W[source] + n - a.arrive_W1[source]} * row_bytes;
    if (lane == 0 && source != to.rank) sent += row_bytes;
    const int num_pairs =
        __popc(__ballot_sync(kAllLanes, lane < a.num_pairs && a.pair_row_NL[int64_t{n} * a.num_pairs + lane] >= 0));
    for (uint32_t at = lane * 16; at - lane * 16 < row_bytes; at += S::kPieceBytes) {
      float sum[kVectors][kNum] = {};
      for (int i = 0; i < num_pairs; ++i) {  // in the order of the pairs
        mbarrier_wait(loaded + 8 * ring.stage, ring.parity);
        const float weight = weights[ring.stage];
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          Raw<T, kNum> raw;
          raw.words[0] = shared.rings[warp].words[ring.stage][v][lane];
          float x[kNum];
          unpack<T>(x, raw);
#pragma unroll
          for (int j = 0; j < kNum; ++j) sum[v][j] += weight * x[j];
        }
        __syncwarp();
        load_piece(ring.stage);
        ring.advance();
      }
#pragma unroll
      for (int v = 0; v < kVectors; ++v)
        if (at + v * 512 < row_bytes) store(reinterpret_cast<T*>(out + at + v * 512), sum[v]);
    }
  }
  add_sent(to, sent);
}

}  // namespace moebius::cuda
