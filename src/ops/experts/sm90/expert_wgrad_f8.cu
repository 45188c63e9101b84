// expert_wgrad of E4M3 operands for sm_90a: dw[e] (+)= left^T right over the rows of e.
//
// Both operands come transposed, so that rows run along their rows: left^T [M, columns] and right^T
// [N, columns], each with a scale for 128 consecutive columns of a row. The rows of an expert begin
// at a multiple of 128 columns, and the columns after its last row hold zeros (core/quantized.h,
// kGroupAlign). So the product has the ring of the forward one, with K cut by the experts.
//
// A block computes 128 x 256 tiles. The two blocks of a cluster have neighbouring rows at the same
// columns and share right^T. A slot is 128 deep, so its product has one scale for each row and one
// for each column:
//
//   load     one thread: both operands by TMA
//   scales   three warps, which take the slots in turn: those of the 256 columns to a place beside the slot, as
//            bf16, which powers of two and NaN are in without rounding
//   consume  two warpgroups, half a slot of 64 x 128 x 128 at a time, which is added, scaled, to f32
//            sums in registers (DeepSeek-V3, arXiv 2412.19437, section 3.3.2)
//
// Each role iterates over the tiles independently.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/sm90/expert_wgrad_adder.h"
#include "ops/experts/sm90/expert_wgrad_variants.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/grouped_gemm/sm90/tiles.h"

namespace moebius::cuda::sm90 {
namespace {

struct WgradParams {
  CUtensorMap a, b, dw;    // left^T, right^T, dw
  const int32_t* offsets;  // [num_experts + 1]; null: one expert has all columns
  const float *scales_a, *scales_b;
  int32_t num_experts, blocks_k;  // blocks of 128 columns in all
  int32_t num_rows, num_columns;  // of dw
  int32_t clusters_down, across;  // clusters down dw, tiles across
  bool accumulate;
};

// A tile: K in blocks [first_k, first_k + num_k) of 128.
struct WgradTile {
  int32_t expert, m, n, first_k, num_k;
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
      if (begin == end && p_.accumulate) continue;  // without it zeros are stored
      const GridStep at = grouped_step(step_ % per_expert, p_.clusters_down, p_.across, kConfig.l2_group);
      tile = {expert, 2 * at.row + rank_, at.col, begin / kConfig.tile_k + expert,
              (end - begin + kConfig.tile_k - 1) / kConfig.tile_k};
      step_ += static_cast<int32_t>(gridDim.x / 2);
      return true;
    }
  }

 private:
  const WgradParams& p_;
  int32_t step_, rank_;
};
static_assert(kGroupAlign == kSm90WgradF8.tile_k);

// The scales of a slot's columns, stored in place of the notes, which this kernel does not use. A thread reads those of
// its columns 8 j + 2 (lane % 4) + {0, 1} of half a slot in four pieces of 16 bytes, and so chunk c of a half has the
// columns 32 (c / 4) + 8 i + 2 (c % 4) + {0, 1} for i < 4.
constexpr uint32_t kChunksOfHalf = 16, kScaleBytes = 2 * kChunksOfHalf * 16;  // of a slot

template <GroupedGemmConfig kConfig>
__device__ __forceinline__ uint32_t column_scales(const SlotRing<kConfig>& ring, uint32_t slot) {
  using Shared = GemmShared<kConfig>;
  static_assert(Shared::kNoteFull % 16 == 0 && kConfig.tile_n == 256 &&
                Shared::kNoteFull + kConfig.num_slots * kScaleBytes <= Shared::kBytes);
  return ring.shared + Shared::kNoteFull + slot * kScaleBytes;
}

// The barrier of a full slot: the loading thread, and each lane of the warp that copies its scales.
constexpr uint32_t kFullArrivals = 1 + 32;

template <GroupedGemmConfig kConfig>
__device__ void load(const WgradParams& p, const SlotRing<kConfig>& ring) {
  using Shared = GemmShared<kConfig>;
  const uint32_t block = cluster_block_rank();
  SlotCursor<kConfig> at;
  WgradWalk<kConfig> walk(p);
  for (WgradTile tile; walk.next(tile);) {
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

__device__ __forceinline__ uint32_t pack_scales(float lo, float hi) {
  return __byte_perm(__float_as_uint(lo), __float_as_uint(hi), 0x7632);
}

// The scales of columns are far apart in memory, so a warp waits for them longer than a slot is multiplied.
constexpr int32_t kScaleWarps = 3;

// A lane copies one chunk of each of this warp's slots, and reads that of its next slot while it waits for a place.
template <GroupedGemmConfig kConfig>
__device__ void copy_scales(const WgradParams& p, const SlotRing<kConfig>& ring, int32_t warp) {
  const auto lane = static_cast<int32_t>(threadIdx.x % 32), in_half = lane % static_cast<int32_t>(kChunksOfHalf);
  const int32_t first = lane / static_cast<int32_t>(kChunksOfHalf) * 128 + in_half / 4 * 32 + in_half % 4 * 2;
  uint32_t begun = 0;  // slots before the tile
  int32_t k = warp;    // the next one of this warp in the tile
  WgradWalk<kConfig> walk(p);
  for (WgradTile tile; walk.next(tile);) {
    const float* scales = p.scales_b + tile.first_k + k;
    int32_t from[8];  // registers are few
    float scale[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int32_t column = tile.n * kConfig.tile_n + first + i / 2 * 8 + i % 2;
      from[i] = min(column, p.num_columns - 1) * p.blocks_k;
      scale[i] = k < tile.num_k ? __ldg(scales + from[i]) : 0.0f;
    }
    for (; k < tile.num_k; k += kScaleWarps) {
      uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = pack_scales(scale[2 * i], scale[2 * i + 1]);
      scales += kScaleWarps;
      if (k + kScaleWarps < tile.num_k) {
#pragma unroll
        for (int i = 0; i < 8; ++i) scale[i] = __ldg(scales + from[i]);
      }
      const uint32_t slot = begun + static_cast<uint32_t>(k), stage = slot % kConfig.num_slots;
      ring.wait_empty({static_cast<int>(stage), slot / kConfig.num_slots % 2});
      asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(column_scales(ring, stage) + lane * 16),
                   "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                   : "memory");
      mbarrier_arrive(ring.full(stage));
    }
    k -= tile.num_k;
    begun += static_cast<uint32_t>(tile.num_k);
  }
}

// The scales of a thread's two rows: pointers to the first ones; consecutive scales along K follow.
struct RowScales {
  const float* of[2];
};

// The order in which the two warpgroups multiply: each waits for its turn before a product, and gives it to the other.
// Named barrier 1 + group is a group's turn. begin() gives the first turn to group 0, and end() takes back the last.
template <WgradTurns kTurns>
struct ProductTurns {
  static constexpr bool kInTurns = kTurns != WgradTurns::free;
  uint32_t group;

  __device__ __forceinline__ void begin() const {
    if (kInTurns && group == 1) arrive(1);
  }
  __device__ __forceinline__ void end() const {
    if (kInTurns && group == 0) wait();
  }
  __device__ __forceinline__ void before_product() const {
    if (kInTurns) wait();
  }
  __device__ __forceinline__ void issued() const {
    if (kTurns == WgradTurns::after_issue) arrive(2 - group);
  }
  __device__ __forceinline__ void completed() const {
    if (kTurns == WgradTurns::after_product) arrive(2 - group);
  }

 private:
  __device__ __forceinline__ void wait() const { asm volatile("bar.sync %0, 256;" ::"r"(1 + group) : "memory"); }
  __device__ __forceinline__ static void arrive(uint32_t barrier) {
    asm volatile("bar.arrive %0, 256;" ::"r"(barrier) : "memory");
  }
};

// Sets sum to the product of a tile, num_k slots. Elements [64 half, 64 half + 64) are the columns
// of a half, as the registers of WgmmaE4m3 have them.
template <GroupedGemmConfig kConfig, WgradTurns kTurns>
__device__ __forceinline__ void multiply(float (&sum)[128], const SlotRing<kConfig>& ring, SlotCursor<kConfig>& at,
                                         const ProductTurns<kTurns>& turns, int32_t num_k, const RowScales& scales) {
  using Shared = GemmShared<kConfig>;
  const uint32_t quad = threadIdx.x % 4;
  float rows[2] = {__ldg(scales.of[0]), __ldg(scales.of[1])};
  float acc[64];
#pragma unroll
  for (int i = 0; i < 128; ++i) sum[i] = 0;
#pragma unroll 1
  for (int32_t k = 0; k < num_k; ++k, at.advance()) {
    const uint32_t slot = at.stage;
    mbarrier_wait(ring.full(slot), at.parity);
    const float next[2] = {k + 1 < num_k ? __ldg(scales.of[0] + k + 1) : 0.0f,
                           k + 1 < num_k ? __ldg(scales.of[1] + k + 1) : 0.0f};
    const uint64_t a = wgmma_operand<Major::k>(ring.a(slot) + turns.group * (Shared::kSlotBytesA / 2));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint64_t b = wgmma_operand<Major::k>(ring.b(slot) + half * Shared::kHalfBytesB);
      turns.before_product();
      hold_registers(acc);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < 4; ++step) WgmmaE4m3::multiply(acc, a + 2 * step, b + 2 * step, step > 0);
      wgmma_commit();
      turns.issued();
      uint4 columns[4];
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) {
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(columns[i].x), "=r"(columns[i].y), "=r"(columns[i].z), "=r"(columns[i].w)
                     : "r"(column_scales(ring, slot) + (half * kChunksOfHalf + 4 * i + quad) * 16)
                     : "memory");
      }
      wgmma_wait<0>();
      hold_registers(acc);
      turns.completed();
      if (half == 1) {
        __syncwarp();  // every lane has read its scales
        ring.release(slot);
      }
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const uint4& chunk = columns[j / 4];
        const uint32_t pair = j % 4 == 0 ? chunk.x : j % 4 == 1 ? chunk.y : j % 4 == 2 ? chunk.z : chunk.w;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float column = i % 2 == 0 ? low_bf16(pair) : high_bf16(pair);
          float& to = sum[64 * half + 4 * j + i];
          to = fmaf(acc[4 * j + i] * column, rows[i / 2], to);
        }
      }
    }
    rows[0] = next[0];
    rows[1] = next[1];
  }
}

// Stores a warp's 16 x 256 sums to dw, or adds them, through its staging buffer.
__device__ __forceinline__ void write_sums(const WgradParams& p, uint32_t staging, const float (&sum)[128], int32_t row,
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
      p.accumulate ? tma_add(&p.dw, place, column + 32 * kPiece, row, expert)
                   : tma_store(&p.dw, place, column + 32 * kPiece, row, expert);
      tma_commit();
    }
  });
}

template <GroupedGemmConfig kConfig, WgradTurns kTurns>
__device__ void consume(const WgradParams& p, const SlotRing<kConfig>& ring) {
  const uint32_t group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  const uint32_t staging = ring.shared + GemmShared<kConfig>::kStaging + warp * kStagingBytesWarp;
  const ProductTurns<kTurns> turns{group};
  turns.begin();
  SlotCursor<kConfig> at;
  WgradWalk<kConfig> walk(p);
  for (WgradTile tile; walk.next(tile);) {
    const int32_t row = tile.m * kConfig.tile_m + static_cast<int32_t>(warp) * 16;
    RowScales scales;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t of_row = min(row + static_cast<int32_t>(lane / 4) + 8 * i, p.num_rows - 1);
      scales.of[i] = p.scales_a + of_row * p.blocks_k + tile.first_k;
    }
    float sum[128];
    multiply(sum, ring, at, turns, tile.num_k, scales);
    write_sums(p, staging, sum, row, tile.n * kConfig.tile_n, tile.expert);
  }
  turns.end();
  if (lane == 0) tma_wait<0>();
}

// A kernel takes its config by a type: nvcc does not launch one that has it as an argument.
template <GroupedGemmConfig kOpConfig, WgradTurns kOpTurns>
struct Wgrad {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr WgradTurns kTurns = kOpTurns;
};

template <class Op>
__global__ void __cluster_dims__(Op::kConfig.cluster, 1, 1) __launch_bounds__(Op::kConfig.threads, 1)
    expert_wgrad_f8_kernel(const __grid_constant__ WgradParams p) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing<kConfig> ring{smem_addr(shared)};
  const uint32_t warp = threadIdx.x / 32;
  if (threadIdx.x == 0) ring.init(kFullArrivals);
  cluster_sync();
  if (warp < 4) {
    fewer_registers<kConfig.producer_registers>();
    if (warp == 0 && elect_one()) load<kConfig>(p, ring);
    if (warp > 0) copy_scales<kConfig>(p, ring, static_cast<int32_t>(warp) - 1);
  } else {
    more_registers<kConfig.consumer_registers>();
    consume<kConfig, Op::kTurns>(p, ring);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

template <class Op>
struct WgradLaunch {
  int blocks =
      persistent_blocks(reinterpret_cast<const void*>(&expert_wgrad_f8_kernel<Op>), GemmShared<Op::kConfig>::kBytes);
};

template <GroupedGemmConfig kConfig, WgradTurns kTurns>
void launch(Stream& s, const WgradProductF8& a, const char* who) {
  using Op = Wgrad<kConfig, kTurns>;
  const int64_t E = a.dw_eMN.dim(0), M = a.dw_eMN.dim(1), N = a.dw_eMN.dim(2);
  MOEBIUS_CHECK(usage, a.right_NR.scales.numel() < INT32_MAX, "{}: at most 2^31 scales; got {}", who,
                to_string(a.right_NR));
  const auto rows = [&](const Operand& x, int height) {
    const int64_t columns = x.data.dim(1);
    return make_tensor_map<2>(x.data.data,
                              {{{columns, 1, static_cast<uint32_t>(kConfig.tile_k)},
                                {x.data.dim(0), columns, static_cast<uint32_t>(height)}}},
                              operand_map(kConfig));
  };
  const MapOptions of_dw{.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, .element_bytes = 4};
  WgradParams p{};
  p.a = rows(a.left_MR, kConfig.tile_m);
  p.b = rows(a.right_NR, kConfig.tile_n / 2);
  p.dw = make_tensor_map<3>(a.dw_eMN.data, {{{N, 1, 32}, {M, N, 16}, {E, M * N, 1}}}, of_dw);
  p.offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>();
  p.scales_a = a.left_MR.scales.ptr<float>();
  p.scales_b = a.right_NR.scales.ptr<float>();
  p.num_experts = static_cast<int32_t>(E);
  p.blocks_k = static_cast<int32_t>(a.left_MR.scales.dim(1));
  p.num_rows = static_cast<int32_t>(M);
  p.num_columns = static_cast<int32_t>(N);
  p.clusters_down = static_cast<int32_t>(div_ceil(M, 2 * kConfig.tile_m));
  p.across = static_cast<int32_t>(div_ceil(N, kConfig.tile_n));
  p.accumulate = a.accumulate;
  const int blocks = limited_blocks(s, op_state<WgradLaunch<Op>>(s).blocks);
  expert_wgrad_f8_kernel<Op><<<blocks, kConfig.threads, GemmShared<kConfig>::kBytes, cuda_stream(s)>>>(p);
  check_launch(who);
}

}  // namespace

void wgrad_product_f8(Stream& s, const WgradProductF8& a, const char* who) {
  launch<kSm90WgradF8, WgradTurns::free>(s, a, who);
}

void wgrad_product_f8_in_turns(Stream& s, const WgradProductF8& a, const char* who, WgradTurns turns) {
  using enum WgradTurns;
  if (turns == free) return launch<kSm90WgradF8, free>(s, a, who);
  turns == after_issue ? launch<kSm90WgradF8, after_issue>(s, a, who) : launch<kSm90WgradF8, after_product>(s, a, who);
}

}  // namespace moebius::cuda::sm90
