// expert_wgrad of E4M3 operands for sm_90a: dw[e] (+)= left^T right over the rows of e.
//
// Both operands come transposed, so that rows run along their rows: left^T [M, columns] with a scale for 128
// consecutive columns of a row, and right^T [N, columns] with one for 128 rows by 128 columns. The rows of an expert
// begin at a multiple of 128 columns, and the columns after its last row hold zeros (core/quantized.h, kGroupAlign). So
// the product is the forward one (ops/grouped_gemm/sm90/block_scaled.h), with K cut by the experts.
//
// A block computes 128 x 256 tiles. The two blocks of a cluster have neighbouring rows at the same columns of dw, so
// that they share right^T.
//
//   load     one thread: both operands by TMA, and the old values of dw if the product is added
//   consume  two warpgroups: the product, and its way to dw (expert_wgrad_f8_results.h)
//
// Each role iterates over the tiles independently. Experts are taken in order: sorted by their numbers of rows, the
// tiles with the fewest K steps, which memory limits, would all run at the same time.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/sm90/expert_wgrad_f8_results.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/grouped_gemm/sm90/tiles.h"

namespace moebius::cuda::sm90 {
namespace {

struct WgradParams {
  CUtensorMap a, b;  // left^T, right^T
  WgradResults dw;
  const int32_t* offsets;  // [num_experts + 1]; null: one expert has all columns
  const float *scales_a, *scales_b;
  int32_t num_experts, blocks_k, blocks_n;  // blocks of 128 columns in all, and of 128 rows of right^T
  int32_t num_rows;                         // of dw
  int32_t clusters_down, across;            // clusters down dw, tiles across
};

// A tile: K in blocks [first_k, first_k + num_k) of 128.
struct WgradTile : ResultTile {
  int32_t first_k, num_k;
};

// The tiles of a block, in order.
template <GroupedGemmConfig kConfig>
class WgradWalk {
 public:
  __device__ explicit WgradWalk(const WgradParams& p)
      : p_(p), step_(static_cast<int32_t>(blockIdx.x / 2)), rank_(static_cast<int32_t>(cluster_block_rank())) {}

  __device__ bool next(WgradTile& tile) {
    const int32_t per_expert = p_.clusters_down * p_.across;
    for (;; step_ += static_cast<int32_t>(gridDim.x / 2)) {
      const int32_t expert = step_ / per_expert;
      if (expert >= p_.num_experts) return false;
      const int32_t begin = p_.offsets ? __ldg(p_.offsets + expert) : 0;
      const int32_t end = p_.offsets ? __ldg(p_.offsets + expert + 1) : p_.blocks_k * kConfig.tile_k;
      if (begin == end && p_.dw.accumulate) continue;  // without it zeros are stored
      const GridStep at = grouped_step(step_ % per_expert, p_.clusters_down, p_.across, kConfig.l2_group);
      tile.expert = expert;
      tile.m = 2 * at.row + rank_;
      tile.n = at.col;
      tile.first_k = begin / kConfig.tile_k + expert;
      tile.num_k = (end - begin + kConfig.tile_k - 1) / kConfig.tile_k;
      step_ += static_cast<int32_t>(gridDim.x / 2);
      return true;
    }
  }

 private:
  const WgradParams& p_;
  int32_t step_, rank_;
};
static_assert(kGroupAlign == kSm90WgradF8.tile_k);

// By one thread. It waits for the staging memory after the sixth K step of a tile. By then the consumers have multiplied
// two slots of the tile, and so they had passed the results before it to the copy engine.
template <GroupedGemmConfig kConfig>
__device__ void load(const WgradParams& p, const SlotRing<kConfig>& ring) {
  using Shared = GemmShared<kConfig>;
  const auto block = static_cast<int32_t>(cluster_block_rank());
  SlotCursor<kConfig> at;
  WgradWalk<kConfig> walk(p);
  ResultLoads<kConfig> results{p.dw, {ring}};
  for (WgradTile tile; walk.next(tile);) {
    const int32_t staged_after = min(tile.num_k, 6) - 1;
    for (int32_t i = 0; i < tile.num_k; ++i, at.advance()) {
      const int32_t k = (tile.first_k + i) * kConfig.tile_k;
      ring.wait_empty(at);
      const uint32_t full = ring.full(at.stage);
      mbarrier_arrive_expect(full, Shared::kSlotBytesA + Shared::kSlotBytesB);
      tma_load(ring.a(at.stage), &p.a, full, k, tile.m * kConfig.tile_m);
      tma_load_multicast(ring.b(at.stage) + block * Shared::kHalfBytesB, &p.b, full, uint16_t{3}, k,
                         tile.n * kConfig.tile_n + block * kConfig.tile_n / 2);
      if (i == staged_after) results.to_staging(tile);
    }
    if (tile.num_k == 0) results.to_staging(tile);
    results.to_slots(tile, at);
  }
}

template <GroupedGemmConfig kConfig>
__device__ void consume(const WgradParams& p, const SlotRing<kConfig>& ring) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  SlotCursor<kConfig> at;
  WgradWalk<kConfig> walk(p);
  ResultWriter<kConfig> results{p.dw, {ring}, warp};
  for (WgradTile tile; walk.next(tile);) {
    float sum[128];
    if (tile.num_k > 0) {
      const int32_t row = tile.m * kConfig.tile_m + static_cast<int32_t>(warp * 16 + lane / 4);
      TileScales scales;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int64_t of_row = min(row + 8 * i, p.num_rows - 1), of_block = min(2 * tile.n + i, p.blocks_n - 1);
        scales.row[i] = p.scales_a + of_row * p.blocks_k + tile.first_k;
        scales.column[i] = p.scales_b + of_block * p.blocks_k + tile.first_k;
      }
      block_scaled_product(sum, ring, at, group, tile.num_k, scales, [&] { results.release(); });
    } else {
      results.release();
#pragma unroll
      for (int i = 0; i < 128; ++i) sum[i] = 0;
    }
    results.write(tile, sum, at);
  }
  if (lane == 0) tma_wait<0>();
}

// A kernel takes its config by a type: nvcc does not launch one that has it as an argument.
template <GroupedGemmConfig kOpConfig>
struct Wgrad {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
};

template <class Op>
__global__ void __cluster_dims__(Op::kConfig.cluster, 1, 1) __launch_bounds__(Op::kConfig.threads, 1)
    expert_wgrad_f8_kernel(const __grid_constant__ WgradParams p) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing<kConfig> ring{smem_addr(shared)};
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) ResultMemory<kConfig>{ring}.init();
  __syncwarp();
  cluster_sync();
  if (warp < 4) {
    fewer_registers<kConfig.producer_registers>();
    if (warp == 0 && elect_one()) load<kConfig>(p, ring);
  } else {
    more_registers<kConfig.consumer_registers>();
    consume<kConfig>(p, ring);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

template <class Op>
struct WgradLaunch {
  int blocks =
      persistent_blocks(reinterpret_cast<const void*>(&expert_wgrad_f8_kernel<Op>), GemmShared<Op::kConfig>::kBytes);
};

template <GroupedGemmConfig kConfig>
void launch(Stream& s, const WgradProductF8& a, const char* who) {
  using Op = Wgrad<kConfig>;
  const int64_t E = a.dw_eMN.dim(0), M = a.dw_eMN.dim(1), N = a.dw_eMN.dim(2);
  const auto rows = [&](const Operand& x, int height) {
    const int64_t columns = x.data.dim(1);
    return make_tensor_map<2>(x.data.data,
                              {{{columns, 1, static_cast<uint32_t>(kConfig.tile_k)},
                                {x.data.dim(0), columns, static_cast<uint32_t>(height)}}},
                              operand_map(kConfig));
  };
  const auto of_dw = [&](uint32_t height) {
    return make_tensor_map<3>(a.dw_eMN.data, {{{N, 1, 32}, {M, N, height}, {E, M * N, 1}}},
                              MapOptions{.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, .element_bytes = 4});
  };
  WgradParams p{};
  p.a = rows(a.left_MR, kConfig.tile_m);
  p.b = rows(a.right_NR, kConfig.tile_n / 2);
  p.dw = {of_dw(kConfig.tile_m), of_dw(16), a.accumulate};
  p.offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>();
  p.scales_a = a.left_MR.scales.ptr<float>();
  p.scales_b = a.right_NR.scales.ptr<float>();
  p.num_experts = static_cast<int32_t>(E);
  p.blocks_k = static_cast<int32_t>(a.left_MR.scales.dim(1));
  p.blocks_n = static_cast<int32_t>(a.right_NR.scales.dim(0));
  p.num_rows = static_cast<int32_t>(M);
  p.clusters_down = static_cast<int32_t>(div_ceil(M, 2 * kConfig.tile_m));
  p.across = static_cast<int32_t>(div_ceil(N, kConfig.tile_n));
  const int blocks = limited_blocks(s, op_state<WgradLaunch<Op>>(s).blocks);
  expert_wgrad_f8_kernel<Op><<<blocks, kConfig.threads, GemmShared<kConfig>::kBytes, cuda_stream(s)>>>(p);
  check_launch(who);
}

}  // namespace

void wgrad_product_f8(Stream& s, const WgradProductF8& a, const char* who) { launch<kSm90WgradF8>(s, a, who); }

}  // namespace moebius::cuda::sm90
