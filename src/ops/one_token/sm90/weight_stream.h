// Products of one row with 16 rows of weights at a time, on a block of nine warps: one copies weights to a ring of
// shared memory, and eight multiply. An element has the bits of ops/experts/sm90/few_rows.cu: warp w sums
// k = 32 w + 256 j + [0, 32) in the order of j, and then the sums of the warps are added in order.
#pragma once

#include "ops/cuda/early_launch.h"
#include "ops/cuda/vector.h"
#include "ops/sm80/mma.h"
#include "ops/sm90/copy.h"

namespace moebius::cuda::sm90 {

constexpr int kStreamWarps = 8;                        // that multiply
constexpr int kStreamMultiplying = kStreamWarps * 32;  // threads
constexpr int kStreamThreads = kStreamMultiplying + 32;
constexpr int kStreamRows = 16;  // rows of weights of a tile
constexpr int kStreamStepK = kStreamWarps * 32;

// The ids of named barriers.
constexpr uint32_t kMultiplyingBarrier = 1, kAllBarrier = 2;

// A ring of kStages stages. A stage holds kSteps * 256 of k of the rows of a tile.
template <int kSteps, int kStages>
struct WeightRing {
  static constexpr int kStageK = kSteps * kStreamStepK;
  static constexpr int kPitch = kStageK * 2 + 64;  // bytes between rows: lanes then read from all banks
  static constexpr int kStageBytes = kStreamRows * kPitch, kBytes = kStages * kStageBytes;

  uint64_t full[kStages], empty[kStages];

  // One thread calls it, before a barrier of the block.
  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      mbarrier_init(smem_addr(full + i), 1);
      mbarrier_init(smem_addr(empty + i), kStreamWarps);
    }
    fence_mbarrier_init();
  }
};

// A warp's walk over the stages, with their shared addresses.
template <int kSteps, int kStages>
struct WeightWalk {
  using R = WeightRing<kSteps, kStages>;
  uint32_t stages, full, empty;
  Ring<kStages> ring;
  __device__ __forceinline__ WeightWalk(const char* stages, R& r)
      : stages(smem_addr(stages)), full(smem_addr(r.full)), empty(smem_addr(r.empty)) {}
};

// The copying warp. A lane below kStreamRows copies a row.
template <int kSteps, int kStages>
struct WeightCopies : WeightWalk<kSteps, kStages> {
  using Walk = WeightWalk<kSteps, kStages>;
  using typename Walk::R;
  using Walk::empty, Walk::full, Walk::ring, Walk::stages, Walk::Walk;
  // from: the lane's row, K elements.
  __device__ __forceinline__ void copy_tile(const char* from, int32_t K) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (int32_t k = 0; k < K; k += R::kStageK) {
      const auto bytes = static_cast<uint32_t>(min(R::kStageK, K - k) * 2);
      mbarrier_wait(empty + 8 * ring.stage, ring.parity ^ 1);
      if (lane == 0) mbarrier_arrive_expect(full + 8 * ring.stage, bytes * kStreamRows);
      __syncwarp();
      if (lane < kStreamRows)
        bulk_load(stages + ring.stage * R::kStageBytes + lane * R::kPitch, from + int64_t{k} * 2, bytes,
                  full + 8 * ring.stage);
      ring.advance();
    }
  }
};

// A multiplying warp.
template <int kSteps, int kStages>
struct WeightProducts : WeightWalk<kSteps, kStages> {
  using Walk = WeightWalk<kSteps, kStages>;
  using typename Walk::R;
  using Walk::empty, Walk::full, Walk::ring, Walk::stages, Walk::Walk;
  // Writes this warp's sums of the tile's rows to to[0, 16). x: the row in shared memory, K elements, a multiple of 8.
  __device__ __forceinline__ void multiply_tile(float* to, uint32_t x, int32_t K) {
    const int lane = static_cast<int>(threadIdx.x % 32), group = lane / 4, quad = lane % 4;
    const int32_t own_k = static_cast<int32_t>(threadIdx.x / 32) * 32 + quad * 8;
    float acc[4] = {};
    for (int32_t k0 = 0; k0 < K; k0 += R::kStageK) {
      mbarrier_wait(full + 8 * ring.stage, ring.parity);
      const uint32_t from = stages + ring.stage * R::kStageBytes + group * R::kPitch + own_k * 2;
      uint4 low[kSteps], high[kSteps], b[kSteps];
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        const int32_t k = k0 + u * kStreamStepK + own_k;
        low[u] = load_shared(from + u * kStreamStepK * 2);
        high[u] = load_shared(from + u * kStreamStepK * 2 + 8 * R::kPitch);
        b[u] = load_shared(x + (k < K ? k : 0) * 2);
      }
      __syncwarp();
      if (lane == 0) mbarrier_arrive(empty + 8 * ring.stage);
      ring.advance();
#pragma unroll
      for (int u = 0; u < kSteps; ++u) {
        // A stage that is not full holds what was there before.
        if (k0 + u * kStreamStepK + own_k >= K) low[u] = high[u] = b[u] = {};
        if (group != 0) b[u] = {};  // the one row is column 0 of the product
        const uint32_t first_a[4] = {low[u].x, high[u].x, low[u].y, high[u].y},
                       second_a[4] = {low[u].z, high[u].z, low[u].w, high[u].w};
        sm80::multiply(acc, first_a, b[u].x, b[u].y);
        sm80::multiply(acc, second_a, b[u].z, b[u].w);
      }
    }
    if (quad != 0) return;
    to[group] = acc[0];
    to[group + 8] = acc[2];
  }
};

// Returns the sum of row `row` over the warps, from `bias` on.
__device__ __forceinline__ float sum_of_warps(const float (&of_warps)[kStreamWarps][kStreamRows], int row, float bias) {
  float sum = bias;
#pragma unroll
  for (int j = 0; j < kStreamWarps; ++j) sum += of_warps[j][row];
  return sum;
}

// Reads the 16 bytes at p past L1.
__device__ __forceinline__ uint4 load_activations(const void* p) { return __ldcg(static_cast<const uint4*>(p)); }

}  // namespace moebius::cuda::sm90
