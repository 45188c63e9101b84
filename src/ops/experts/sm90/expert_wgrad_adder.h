// Moves the sums of expert_wgrad from a consumer warp's registers to dw: in pieces of 16 x 32 through the warp's
// staging buffer in shared memory. From there the copy engine stores them, or adds them in L2. One block owns each
// element, so there are one or two writes to it, far apart in time. (red.global processes one lane per cycle, which
// takes four times as long.)
//
// Half of a tile's pieces are passed to the copy engine when the tile is complete. The others stay in registers, and K
// steps of the next tile pass one each. Adding the whole tile at once would occupy the copy engine for thousands of
// cycles, and delay the loads of the next tile.
#pragma once

#include "ops/cuda/for_each_constant.h"
#include "ops/sm90/sm90.h"

namespace moebius::cuda::sm90 {

constexpr uint32_t kPieceBytes = 16 * 32 * 4;
constexpr int kPieces = 8, kHeldPieces = 4, kFirstHeld = kPieces - kHeldPieces;
constexpr int kStagingPlaces = 2;  // of each warp; pieces take them in turn

__device__ __forceinline__ void store_pair(uint32_t to, float x, float y) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(x), "f"(y) : "memory");
}
__device__ __forceinline__ void store_one(uint32_t to, float x) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(x) : "memory");
}

// Writes sum[16 kPiece, 16 kPiece + 16), 32 columns of a warp's 16 rows, to staging in the layout of dw, with the
// swizzle of the copy engine. Along the plain side: 16 rows of 128 bytes; along the gathered side:
// 32 rows of 64 bytes.
template <bool kGatheredIsLeft, int kPiece, int kNum>
__device__ __forceinline__ void stage_piece(uint32_t to, const float (&sum)[kNum]) {
  const uint32_t lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
#pragma unroll
  for (uint32_t j = 0; j < 4; ++j) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i) {
      const float lo = sum[16 * kPiece + 4 * j + 2 * i], hi = sum[16 * kPiece + 4 * j + 2 * i + 1];
      if constexpr (kGatheredIsLeft) {
        store_pair(to + swizzle_128(row + 8 * i, 2 * j + quad / 2) + quad % 2 * 8, lo, hi);
      } else {
        const uint32_t chunk = (2 * i + row / 4) ^ quad, at = to + (8 * j + 2 * quad) * 64 + chunk * 16 + row % 4 * 4;
        store_one(at, lo);
        store_one(at + 64, hi);
      }
    }
  }
}

// dw (+)= the sums of a warp, tile by tile: 16 of the gathered side by 256 of the plain side. All functions are by the
// whole warp; its lane 0 issues the copies and waits for them.
template <bool kGatheredIsLeft>
struct SumAdder {
  const CUtensorMap& dw;
  uint32_t staging;                         // kStagingPlaces pieces
  bool adds = false;                        // the tile's sums are added to dw, not stored
  int expert = 0, gathered = 0, plain = 0;  // where the tile's sums begin in dw
  bool pending = false;                     // pieces are held
  float held[16 * kHeldPieces];

  // Hands over the first pieces of a finished tile, and holds the others. All held before have been
  // handed over.
  __device__ __forceinline__ void take(const float (&sum)[128], int to_expert, int to_gathered, int to_plain,
                                       bool is_added) {
    expert = to_expert;
    adds = is_added;
    gathered = to_gathered;
    plain = to_plain;
    // Waits until all buffers are free, and this warp's earlier writes to the same elements are complete, so that
    // writes are ordered.
    if (issues()) tma_wait<0>();
    __syncwarp();
    for_each_constant<0, kFirstHeld>([&](auto piece) {
      constexpr int kPiece = decltype(piece)::value;
      if constexpr (kPiece >= kStagingPlaces) wait_place();
      stage_piece<kGatheredIsLeft, kPiece>(place<kPiece>(), sum);
      issue<kPiece>();
    });
#pragma unroll
    for (int i = 0; i < 16 * kHeldPieces; ++i) held[i] = sum[16 * kFirstHeld + i];
    pending = true;
  }
  // Passes held piece kTurn to the copy engine.
  template <int kTurn>
  __device__ __forceinline__ void add_held() const {
    constexpr int kPiece = kFirstHeld + kTurn;
    wait_place();
    stage_piece<kGatheredIsLeft, kTurn>(place<kPiece>(), held);
    issue<kPiece>();
    __syncwarp();
  }
  // Waits until the copy engine has read all pieces.
  __device__ __forceinline__ void finish() const {
    if (pending) for_each_constant<0, kHeldPieces>([&](auto turn) { add_held<decltype(turn)::value>(); });
    tma_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ bool issues() { return threadIdx.x % 32 == 0; }
  template <int kPiece>
  __device__ __forceinline__ uint32_t place() const {
    return staging + kPiece % kStagingPlaces * kPieceBytes;
  }
  // Waits until the buffer of the next piece is free.
  static __device__ __forceinline__ void wait_place() {
    if (issues()) tma_wait_read<kStagingPlaces - 1>();
    __syncwarp();
  }
  // Starts the copy of a piece, after all lanes have stored it.
  template <int kPiece>
  __device__ __forceinline__ void issue() const {
    fence_proxy_async();
    __syncwarp();
    if (!issues()) return;
    const uint32_t from = place<kPiece>();
    const int at = plain + 32 * kPiece, x = kGatheredIsLeft ? at : gathered, y = kGatheredIsLeft ? gathered : at;
    adds ? tma_add(&dw, from, x, y, expert) : tma_store(&dw, from, x, y, expert);
    tma_commit();
  }
};

}  // namespace moebius::cuda::sm90
