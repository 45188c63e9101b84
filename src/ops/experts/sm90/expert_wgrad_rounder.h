// Adds the sums of expert_wgrad to a dw in bf16, and rounds each element once. As in expert_wgrad_adder.h, a consumer
// warp's sums pass through its staging buffer in pieces of 16 x 32, half of them held in registers for a while.
//
// The copy engine adds bf16 only to bf16, which would round twice. So it loads what is in dw to the place of a piece,
// the warp adds its sums in f32 and rounds, and the copy engine stores the place. A place takes two pieces of a tile in
// turn. Turns between the K steps of the next tile start the loads early, so that no piece waits for memory:
//   turn 0        the loads of the held pieces of the tile before
//   turns 2 to 5  a held piece each
//   turns 3 to 6  the load of a first piece of the tile that is computed, into the place that was free the turn before
//
// A tile that is cut has two sums, which are added in f32 before they are rounded: each thread keeps its sums of the
// first part in memory of its own until it computes the second part.
#pragma once

#include "ops/cuda/for_each_constant.h"
#include "ops/experts/sm90/expert_wgrad_adder.h"
#include "ops/experts/sm90/expert_wgrad_walk.h"
#include "ops/sm80/mma.h"
#include "ops/sm90/sm90.h"

namespace moebius::cuda::sm90 {

constexpr uint32_t kRoundedBytes = 16 * 32 * 2;
constexpr int kPlaces = 4;  // places of each warp
static_assert(kPlaces * kRoundedBytes == kStagingPlaces * kPieceBytes && kPlaces == kFirstHeld);
constexpr int kPartsOfBlock = 128 * 256 / 4;  // in float4
constexpr int kFirstHeldTurn = 2, kFirstLoadTurn = 3, kTurns = kFirstLoadTurn + kPlaces;

// Stores the matrices that sm80::load_matrices loads.
template <bool kTransposed>
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&words)[4]) {
  if constexpr (kTransposed)
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(words[0]),
                 "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  else
    stmatrix_4(to, words[0], words[1], words[2], words[3]);
}

// dw (+)= the sums of a warp, tile by tile, rounded to bf16. All functions are by the whole warp.
template <bool kGatheredIsLeft>
struct SumRounder {
  const CUtensorMap& dw;
  const Params& p;
  uint32_t staging;                         // kPlaces places
  uint32_t barriers;                        // barriers of the loads into them
  int expert = 0, gathered = 0, plain = 0;  // where the held pieces' tile begins in dw
  bool pending = false;                     // pieces are held
  float held[16 * kHeldPieces];

  // A tile, and where this warp's sums of it begin in dw.
  struct Place {
    TileTag tag;
    int gathered, plain;
  };

  // Does what turn kTurn has to do while the tile at `now` is computed.
  template <int kTurn>
  __device__ __forceinline__ void turn(const Place& now) {
    if constexpr (kTurn == 0) {
      if (pending && p.accumulate) {
        wait_read();
        for_each_constant<kFirstHeld, kPieces>(
            [&](auto piece) { load<decltype(piece)::value>(expert, gathered, plain); });
      }
    }
    if constexpr (kTurn >= kFirstLoadTurn && kTurn < kTurns) {
      if (p.accumulate && now.tag.part() != TilePart::first) {
        wait_read();
        load<kTurn - kFirstLoadTurn>(now.tag.expert(), now.gathered, now.plain);
      }
    }
    if constexpr (kTurn >= kFirstHeldTurn && kTurn < kFirstHeldTurn + kHeldPieces) {
      if (pending) round<kFirstHeld + kTurn - kFirstHeldTurn, kTurn - kFirstHeldTurn>(held);
    }
  }
  // Takes the sums of a finished tile, after all turns.
  __device__ __forceinline__ void take(float (&sum)[128], const Place& at) {
    pending = at.tag.part() != TilePart::first;
    if (!pending) {
      float4* parts = first_parts(at.tag);
#pragma unroll
      for (int i = 0; i < 32; ++i)
        parts[i * 256] = make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
      return;
    }
    if (at.tag.part() == TilePart::second) {
      const float4* parts = first_parts(at.tag);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const float4 first = parts[i * 256];
        sum[4 * i] += first.x, sum[4 * i + 1] += first.y, sum[4 * i + 2] += first.z, sum[4 * i + 3] += first.w;
      }
    }
    expert = at.tag.expert();
    gathered = at.gathered;
    plain = at.plain;
    for_each_constant<0, kFirstHeld>([&](auto piece) { round<decltype(piece)::value, decltype(piece)::value>(sum); });
#pragma unroll
    for (int i = 0; i < 16 * kHeldPieces; ++i) held[i] = sum[16 * kFirstHeld + i];
  }
  // Stores what is held, and waits until the copy engine has read it.
  __device__ __forceinline__ void finish() {
    Place none{};
    none.tag.set(TilePart::first, 0);
    for_each_constant<0, kTurns>([&](auto at) { turn<decltype(at)::value>(none); });
    if (issues()) tma_wait_read<0>();
  }

 private:
  static __device__ __forceinline__ bool issues() { return threadIdx.x % 32 == 0; }
  // This thread's sums of the first part of a tile.
  __device__ __forceinline__ float4* first_parts(TileTag tag) const {
    const int64_t block = int64_t{2} * tag.number() + cluster_block_rank();
    return p.first_parts + block * kPartsOfBlock + (threadIdx.x - 128);
  }
  template <int kPiece>
  __device__ __forceinline__ uint32_t place() const {
    return staging + kPiece % kPlaces * kRoundedBytes;
  }
  template <int kPiece>
  __device__ __forceinline__ uint32_t barrier() const {
    return barriers + kPiece % kPlaces * 8;
  }
  // Waits until the copy engine has read all places.
  static __device__ __forceinline__ void wait_read() {
    if (issues()) tma_wait_read<0>();
    __syncwarp();
  }
  template <int kPiece>
  __device__ __forceinline__ void load(int to_expert, int to_gathered, int to_plain) const {
    if (issues()) {
      const int at = to_plain + 32 * kPiece;
      mbarrier_arrive_expect(barrier<kPiece>(), kRoundedBytes);
      tma_load(place<kPiece>(), &dw, barrier<kPiece>(), kGatheredIsLeft ? at : to_gathered,
               kGatheredIsLeft ? to_gathered : at, to_expert);
    }
    __syncwarp();
  }
  // Returns the address of this lane's row of 16 bytes of the matrices of rows [8 kHalf, 8 kHalf + 8) of the gathered
  // side, with the swizzle of the copy engine: rows of 64 bytes along the plain side, or of 32 along the gathered one.
  template <int kHalf>
  static __device__ __forceinline__ uint32_t matrices_at(uint32_t place) {
    const uint32_t lane = threadIdx.x % 32, matrix = lane / 8, row = lane % 8;
    if constexpr (kGatheredIsLeft) return place + kHalf * 512 + row * 64 + (matrix ^ row / 2) * 16;
    return place + (8 * matrix + row) * 32 + (kHalf ^ row / 4) * 16;
  }
  // Completes piece kPiece, values[16 kIndex, 16 kIndex + 16), and passes it to the copy engine. A place was loaded
  // once for each half of a tile, so the half is the parity of its barrier. Without loads the copy engine must have
  // read it.
  template <int kPiece, int kIndex, int kNum>
  __device__ __forceinline__ void round(const float (&values)[kNum]) const {
    if (p.accumulate)
      mbarrier_wait(barrier<kPiece>(), kPiece / kPlaces);
    else if (kPiece == 0 || kPiece >= kPlaces)
      wait_read();
    for_each_constant<0, 2>([&](auto half) {
      constexpr int kHalf = decltype(half)::value;
      const uint32_t at = matrices_at<kHalf>(place<kPiece>());
      uint32_t words[4];
      if (p.accumulate) sm80::load_matrices<!kGatheredIsLeft>(words, at);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float lo = values[16 * kIndex + 4 * j + 2 * kHalf], hi = values[16 * kIndex + 4 * j + 2 * kHalf + 1];
        if (p.accumulate) lo = low_bf16(words[j]) + lo, hi = high_bf16(words[j]) + hi;
        words[j] = pack_bf16(lo, hi);
      }
      store_matrices<!kGatheredIsLeft>(at, words);
    });
    fence_proxy_async();
    __syncwarp();
    if (issues()) {
      const int at = plain + 32 * kPiece;
      tma_store(&dw, place<kPiece>(), kGatheredIsLeft ? at : gathered, kGatheredIsLeft ? gathered : at, expert);
      tma_commit();
    }
    __syncwarp();
  }
};

}  // namespace moebius::cuda::sm90
