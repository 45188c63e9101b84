// expert_wgrad of E4M3 operands for sm_90a: dw[e] += left^T right over the rows of e.
//
// Both operands come transposed, so that rows run along their rows: left^T [M, columns] with a scale
// for 1 x 128, right^T [N, columns] with one for 128 x 128. The rows of an expert begin at a multiple
// of 128 columns, and the columns after its last row hold zeros (core/quantized.h, kGroupAlign). So
// the product has the main loop of the forward one, with K cut by the experts.
//
// A block computes 128 x 256 tiles. The two blocks of a cluster have neighbouring rows at the same
// columns and share right^T. Both the thread that loads and the warps that multiply walk the tiles by
// themselves.
#pragma once

#include "ops/experts/sm90/expert_wgrad_adder.h"
#include "ops/grouped_gemm/sm90/block_scaled.h"
#include "ops/grouped_gemm/sm90/tiles.h"

namespace moebius::cuda::sm90 {

struct WgradF8Params {
  CUtensorMap a, b, dw;    // left^T, right^T, dw
  const int32_t* offsets;  // [num_experts + 1]
  const float *scales_a, *scales_b;
  int32_t num_experts, blocks_k;  // blocks of 128 columns in all
  int32_t num_rows, blocks_n;     // M; blocks of 128 rows of right^T
  int32_t clusters_m, tiles_n;    // clusters down dw, tiles across
};

// A tile with rows: K in blocks [first_k, first_k + num_k) of 128.
struct WgradF8Tile {
  int32_t expert, m, n, first_k, num_k;
};

template <GroupedGemmConfig kConfig>
class WgradF8Walk {
 public:
  __device__ explicit WgradF8Walk(const WgradF8Params& p)
      : p_(p), step_(static_cast<int32_t>(blockIdx.x / 2)), rank_(static_cast<int32_t>(cluster_block_rank())) {}

  __device__ bool next(WgradF8Tile& tile) {
    const int32_t per_expert = p_.clusters_m * p_.tiles_n;
    for (;; step_ += static_cast<int32_t>(gridDim.x / 2)) {
      const int32_t expert = step_ / per_expert;
      if (expert >= p_.num_experts) return false;
      const int32_t begin = __ldg(p_.offsets + expert), end = __ldg(p_.offsets + expert + 1);
      if (begin == end) continue;
      const GridStep at = grouped_step(step_ % per_expert, p_.clusters_m, p_.tiles_n, kConfig.l2_group);
      tile = {expert, 2 * at.row + rank_, at.col, begin / 128 + expert, (end - begin + 127) / 128};
      step_ += static_cast<int32_t>(gridDim.x / 2);
      return true;
    }
  }

 private:
  const WgradF8Params& p_;
  int32_t step_, rank_;
};

template <GroupedGemmConfig kConfig>
__device__ void load_wgrad_f8(const WgradF8Params& p, const SlotRing<kConfig>& ring) {
  using Shared = GemmShared<kConfig>;
  const uint32_t block = cluster_block_rank();
  SlotCursor<kConfig> at;
  WgradF8Walk<kConfig> walk(p);
  for (WgradF8Tile tile; walk.next(tile);) {
    for (int32_t k = tile.first_k; k < tile.first_k + tile.num_k; ++k, at.advance()) {
      ring.wait_empty(at);
      const uint32_t full = ring.full(at.stage);
      mbarrier_arrive_expect(full, Shared::kSlotBytesA + Shared::kSlotBytesB);
      tma_load(ring.a(at.stage), &p.a, full, k * kConfig.tile_k, tile.m * kConfig.tile_m);
      tma_load_multicast(ring.b(at.stage) + block * Shared::kHalfBytesB, &p.b, full, uint16_t{3}, k * kConfig.tile_k,
                         tile.n * kConfig.tile_n + static_cast<int32_t>(block) * kConfig.tile_n / 2);
    }
  }
}

// A warp's 16 x 256 sums to dw by way of its staging.
__device__ __forceinline__ void add_sums(const CUtensorMap& dw, uint32_t staging, const float (&sum)[128], int32_t row,
                                         int32_t column, int32_t expert) {
  const bool issues = threadIdx.x % 32 == 0;
  for_each_constant<0, kPieces>([&](auto piece) {
    constexpr int kPiece = decltype(piece)::value;
    if (issues) tma_wait_read<kStagingPlaces - 1>();
    __syncwarp();
    const uint32_t place = staging + kPiece % kStagingPlaces * kPieceBytes;
    stage_piece<true, kPiece>(place, sum);
    fence_proxy_async();
    __syncwarp();
    if (issues) {
      tma_add(&dw, place, column + 32 * kPiece, row, expert);
      tma_commit();
    }
  });
}

template <GroupedGemmConfig kConfig>
__device__ void consume_wgrad_f8(const WgradF8Params& p, const SlotRing<kConfig>& ring) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const uint32_t staging = ring.shared + GemmShared<kConfig>::kStaging + warp * kStagingBytesWarp;
  const int64_t blocks_k = p.blocks_k;
  SlotCursor<kConfig> at;
  WgradF8Walk<kConfig> walk(p);
  for (WgradF8Tile tile; walk.next(tile);) {
    const int32_t row = tile.m * kConfig.tile_m + static_cast<int32_t>(warp) * 16;
    TileScales scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t of_row = min(row + static_cast<int32_t>(lane / 4) + 8 * i, p.num_rows - 1);
      const int32_t of_column = min(2 * tile.n + i, p.blocks_n - 1);
      scales.row[i] = p.scales_a + of_row * blocks_k + tile.first_k;
      scales.column[i] = p.scales_b + of_column * blocks_k + tile.first_k;
    }
    float sum[128];
    block_scaled_product<false>(sum, ring, at, group, tile.num_k, scales);
    // What this warp added to the same element before is there: additions have an order.
    add_sums(p.dw, staging, sum, row, tile.n * kConfig.tile_n, tile.expert);
  }
  if (lane == 0) tma_wait<0>();
}

// A kernel takes its config by a type: nvcc does not launch one that has it as an argument.
template <GroupedGemmConfig kOpConfig>
struct WgradF8 {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
};

template <class Op>
__global__ void __cluster_dims__(Op::kConfig.cluster, 1, 1) __launch_bounds__(Op::kConfig.threads, 1)
    expert_wgrad_f8_kernel(const __grid_constant__ WgradF8Params p) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  using Shared = GemmShared<kConfig>;
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing<kConfig> ring{smem_addr(shared)};
  if (threadIdx.x == 0) ring.init(1);
  cluster_sync();
  if (threadIdx.x < 128) {
    fewer_registers<kConfig.producer_registers>();
    if (threadIdx.x / 32 == 0 && elect_one()) load_wgrad_f8<kConfig>(p, ring);
  } else {
    more_registers<kConfig.consumer_registers>();
    consume_wgrad_f8<kConfig>(p, ring);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

}  // namespace moebius::cuda::sm90
