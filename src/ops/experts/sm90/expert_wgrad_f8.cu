// expert_wgrad of FP8 operands for sm_90a: dw[e] (+)= left^T right over the rows of e.
//
// Both operands come transposed, so that rows run along their rows: left^T [M, columns] with a scale for 128
// consecutive columns of a row, and right^T [N, columns] with one for 128 rows by 128 columns. Or each has one scale,
// and left^T is then E5M2. The rows of an expert begin at a multiple of 128 columns, and the columns after its last row
// hold zeros (core/quantized.h, kGroupAlign). So the product is the forward one (ops/grouped_gemm/sm90/block_scaled.h),
// with K cut by the experts.
//
// A block computes 128 x 256 tiles. The two blocks of a cluster have neighbouring rows at the same columns of dw, so
// that they share right^T. The tiles of a dense product that do not fill a round of clusters are cut over K into parts
// (ops/experts/wgrad_parts.h), which a second kernel adds.
//
//   load     one thread: both operands by TMA, and the old values of dw if the product is added
//   consume  two warpgroups: the product, and its way to dw (expert_wgrad_f8_results.h)
//
//   places   one warp: the tiles of the cluster (expert_wgrad_f8_schedule.h)
//   scales   one warp, with scales of blocks: those of each slot (expert_wgrad_f8_scales.h)
//
// Each role iterates over the tiles independently. The last K step of a tile multiplies only as many columns as have
// rows, in multiples of 32. A chain of wgmma for each number of them needs no more registers; a loop of its own for the
// last step spilled 900 bytes of them.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/sm90/expert_wgrad_f8_results.h"
#include "ops/experts/sm90/expert_wgrad_f8_scales.h"
#include "ops/experts/sm90/expert_wgrad_f8_schedule.h"
#include "ops/experts/wgrad_parts.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/grouped_gemm/sm90/slots.h"
#include "ops/grouped_gemm/sm90/tiles.h"

namespace moebius::cuda::sm90 {
namespace {

struct WgradParams {
  CUtensorMap a, b;  // left^T, right^T
  WgradResults dw;
  const int32_t* offsets;         // [num_experts + 1]; null: one expert has all columns
  int32_t num_experts, blocks_k;  // blocks of 128 columns in all
  int32_t num_rows;               // of dw
  int32_t clusters_down, across;  // clusters down dw, tiles across
  int32_t whole, cut, parts;      // with kCutsK: as WgradParts
};

template <class Scales>
struct ScaledParams : WgradParams {
  Scales scales;  // BlockScales: blocks_n of all rows of right^T
};

// The K blocks of an expert in the operands.
template <GroupedGemmConfig kConfig>
__device__ __forceinline__ ExpertBlocks blocks_of(const WgradParams& p, int32_t expert) {
  constexpr int32_t kK = kConfig.tile_k, kStep = kK / kStepsOfSlot;
  if (!p.offsets) return {0, p.blocks_k, kStepsOfSlot};
  const int32_t begin = __ldg(p.offsets + expert), rows = __ldg(p.offsets + expert + 1) - begin;
  const int32_t num = (rows + kK - 1) / kK;
  return {begin / kK + expert, num, (rows - (num - 1) * kK + kStep - 1) / kStep};
}

// Returns whether dw of the expert does not change.
__device__ __forceinline__ bool keeps_dw(const WgradParams& p, const ExpertBlocks& blocks) {
  return blocks.num == 0 && p.dw.accumulate;  // without it zeros are stored
}

// A tile, of the K blocks of its expert.
struct WgradTile : ResultTile {
  ExpertBlocks k;
};

// The tiles of a block, in order, where there are offsets.
template <GroupedGemmConfig kConfig>
class WgradWalk {
 public:
  __device__ WgradWalk(const WgradParams& p, const PlaceMemory& places)
      : p_(p),
        places_(places),
        rounds_(p.clusters_down * p.across),
        rank_(static_cast<int32_t>(cluster_block_rank())),
        is_balanced_(rounds_.are_balanced(p.num_experts)) {}

  __device__ bool next(WgradTile& tile) {
    for (; expert_ < p_.num_experts; ++expert_, round_ = 0) {
      tile.k = blocks_of<kConfig>(p_, expert_);
      if (keeps_dw(p_, tile.k) || round_ > rounds_.whole) continue;
      int32_t place = rounds_.own;
      if (round_ == rounds_.whole) place = is_balanced_ ? places_.read(expert_) : rounds_.in_turn(expert_);
      const int32_t step = round_++ * rounds_.clusters + place;
      if (place < 0) continue;
      const GridStep at = grouped_step(step, p_.clusters_down, p_.across, kConfig.l2_group);
      tile.expert = expert_;
      tile.m = 2 * at.row + rank_;
      tile.n = at.col;
      return true;
    }
    return false;
  }

 private:
  const WgradParams& p_;
  PlaceMemory places_;
  TileRounds rounds_;
  int32_t rank_;
  bool is_balanced_;
  int32_t expert_ = 0, round_ = 0;
};

// The same of a dense product: its whole tiles, then the parts of the others, in turns.
template <GroupedGemmConfig kConfig>
class CutWalk {
 public:
  __device__ CutWalk(const WgradParams& p, const PlaceMemory&)
      : p_(p),
        rank_(static_cast<int32_t>(cluster_block_rank())),
        clusters_(static_cast<int32_t>(gridDim.x / 2)),
        item_(static_cast<int32_t>(blockIdx.x / 2)) {}

  __device__ bool next(WgradTile& tile) {
    tile.k = {0, p_.blocks_k, kStepsOfSlot};
    if (keeps_dw(p_, tile.k) || item_ >= p_.whole + p_.cut * p_.parts) return false;
    int32_t step = item_;
    tile.part = item_ - p_.whole;
    if (tile.part >= 0) {
      step = p_.whole + tile.part / p_.parts;
      const int32_t part = tile.part % p_.parts, begin = begin_of(part);
      tile.k = {begin, begin_of(part + 1) - begin, kStepsOfSlot};
    }
    const GridStep at = grouped_step(step, p_.clusters_down, p_.across, kConfig.l2_group);
    tile.expert = 0;
    tile.m = 2 * at.row + rank_;
    tile.n = at.col;
    item_ += clusters_;
    return true;
  }

 private:
  // The first K block of a part.
  __device__ int32_t begin_of(int32_t part) const {
    return static_cast<int32_t>(int64_t{p_.blocks_k} * part / p_.parts);
  }

  const WgradParams& p_;
  int32_t rank_, clusters_, item_;
};

template <class Op>
using WalkOf = std::conditional_t<Op::kCutsK, CutWalk<Op::kConfig>, WgradWalk<Op::kConfig>>;

// By a warp, for the walks of its block. Results take about as long as four K steps.
template <GroupedGemmConfig kConfig>
__device__ void find_places(const WgradParams& p, const PlaceMemory& places) {
  constexpr int32_t kStepsOfResults = 4;
  const TileRounds rounds(p.clusters_down * p.across);
  if (!rounds.are_balanced(p.num_experts)) return;
  find_places(rounds, p.num_experts, places, [&](int32_t expert) {
    const ExpertBlocks blocks = blocks_of<kConfig>(p, expert);
    return keeps_dw(p, blocks) ? 0 : blocks.num + kStepsOfResults;
  });
}
static_assert(kGroupAlign == kSm90WgradF8.tile_k);

// The loading thread calls this before the first tile. Tiles of experts with as many rows take equally long. If all
// clusters began together, they would read and write results at the same moments, and multiply at the same moments.
// So a third of the clusters begins a third of a tile later, and another third two thirds of a tile later. No bit
// depends on it. If the first experts differ in rows, clusters do not stay together, and none waits.
template <GroupedGemmConfig kConfig>
__device__ void wait_for_turn(const WgradParams& p) {
  constexpr int32_t kExperts = 3, kMinSteps = 8, kMinTiles = 16, kStepsOfResults = 4, kCyclesOfAStep = 1500;
  const TileRounds rounds(p.clusters_down * p.across);
  if (p.num_experts < kExperts) return;
  const int32_t steps = blocks_of<kConfig>(p, 0).num;
  for (int32_t expert = 1; expert < kExperts; ++expert) {
    if (blocks_of<kConfig>(p, expert).num != steps) return;
  }
  const int64_t tiles = int64_t{p.num_experts} * p.clusters_down * p.across;
  if (steps < kMinSteps || tiles < int64_t{kMinTiles} * rounds.clusters) return;
  const int64_t cycles = int64_t{rounds.own * 3 / rounds.clusters} * (steps + kStepsOfResults) * kCyclesOfAStep / 3,
                begin = clock64();
  while (clock64() - begin < cycles) __nanosleep(200);
}

// By one thread. It waits for the staging memory after the sixth K step of a tile. By then the consumers have
// multiplied two slots of the tile, and so they had passed the results before it to the copy engine.
template <class Op>
__device__ void load(const WgradParams& p, const SlotRing<Op::kConfig>& ring, const PlaceMemory& places) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  using Shared = GemmShared<kConfig>;
  const auto block = static_cast<int32_t>(cluster_block_rank());
  SlotCursor<kConfig> at;
  WalkOf<Op> walk(p, places);
  ResultLoads<kConfig, Op::kCutsK> results{p.dw, {ring}};
  if constexpr (!Op::kCutsK) wait_for_turn<kConfig>(p);
  for (WgradTile tile; walk.next(tile);) {
    const int32_t staged_after = min(tile.k.num, 6) - 1;
    for (int32_t i = 0; i < tile.k.num; ++i, at.advance()) {
      const int32_t k = (tile.k.first + i) * kConfig.tile_k;
      ring.wait_empty(at);
      const uint32_t full = ring.full(at.stage);
      mbarrier_arrive_expect(full, Shared::kSlotBytesA + Shared::kSlotBytesB);
      tma_load(ring.a(at.stage), &p.a, full, k, tile.m * kConfig.tile_m);
      tma_load_multicast(ring.b(at.stage) + block * Shared::kHalfBytesB, &p.b, full, uint16_t{3}, k,
                         tile.n * kConfig.tile_n + block * kConfig.tile_n / 2);
      results.prefetch(tile, i);
      if (i == staged_after) results.to_staging(tile);
    }
    if (tile.k.num == 0) results.to_staging(tile);
    results.to_slots(tile, at);
  }
}

// The scales of slots are copied by a warp of their own, or there is one for the whole tile.
template <class Scales>
constexpr bool kCopiesScales = std::is_same_v<Scales, BlockScales>;

// By a warp, for each slot that load() fills.
template <class Op>
__device__ void load_scales(const ScaledParams<BlockScales>& p, const SlotRing<Op::kConfig>& ring,
                            const PlaceMemory& places, const ScaleMemory<Op::kConfig>& memory) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  SlotCursor<kConfig> at;
  WalkOf<Op> walk(p, places);
  ScaleCopies<kConfig> copies{memory};
  for (WgradTile tile; walk.next(tile);) {
    for (int32_t i = 0; i < static_cast<int32_t>(copies.kRows); ++i) {
      const int64_t row = min(tile.m * kConfig.tile_m + lane + 32 * i, p.num_rows - 1);
      copies.of_row[i] = p.scales.a + row * p.blocks_k + tile.k.first;
    }
    const int64_t column = min(2 * tile.n + lane % 2, p.scales.blocks_n - 1);
    copies.of_column = p.scales.b + column * p.blocks_k + tile.k.first;
    for (int32_t i = 0; i < tile.k.num; ++i, at.advance()) {
      ring.wait_empty(at);
      copies.to_slot(at.stage, ring.full(at.stage), i);
    }
    for (int32_t i = 0; i < ResultMemory<kConfig>::kSlots; ++i, at.advance()) {
      ring.wait_empty(at);
      mbarrier_arrive(ring.full(at.stage));
    }
  }
}

// The scales of a tile for a thread of consumer warp `warp`.
template <GroupedGemmConfig kConfig>
__device__ __forceinline__ LandedScales<kConfig> scales_of(const ScaledParams<BlockScales>&,
                                                           const ScaleMemory<kConfig>& memory, uint32_t warp) {
  return {memory, warp * 16 + threadIdx.x % 32 / 4};
}
template <GroupedGemmConfig kConfig, class MultiplyA>
__device__ __forceinline__ TensorTileScales<MultiplyA> scales_of(const ScaledParams<TensorScales<MultiplyA>>& p,
                                                                 const ScaleMemory<kConfig>&, uint32_t) {
  return {__ldg(p.scales.a) * __ldg(p.scales.b)};
}

template <class Op>
__device__ void consume(const typename Op::Params& p, const SlotRing<Op::kConfig>& ring, const PlaceMemory& places,
                        const ScaleMemory<Op::kConfig>& scales) {
  const uint32_t group = uniform(threadIdx.x / 128 - 1), warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
  SlotCursor<Op::kConfig> at;
  WalkOf<Op> walk(p, places);
  ResultWriter<Op::kConfig, Op::kCutsK> results{p.dw, {ring}, warp};
  WgradTile tile, next;
  bool more = walk.next(tile);
  while (more) {
    // While the first slot of a tile is multiplied, the next tile is found.
    bool found = false;
    const auto meanwhile = [&] {
      results.release();
      if (found) return;
      more = walk.next(next);
      found = true;
      __syncwarp();  // threads may leave the wait for a place apart
    };
    __syncwarp();
    float sum[128];
    if (tile.k.num > 0) {
      scaled_product</*kCutsLast=*/true>(sum, ring, at, group, tile.k.num, scales_of(p, scales, warp), meanwhile,
                                         tile.k.last_steps);
    } else {
      meanwhile();
#pragma unroll
      for (int i = 0; i < 128; ++i) sum[i] = 0;
    }
    results.write(tile, sum, at);
    tile = next;
  }
  if (lane == 0) tma_wait<0>();
}

// A kernel takes its config by a type: nvcc does not launch one that has it as an argument.
template <GroupedGemmConfig kOpConfig, class Scales, bool kIsDense>
struct Wgrad {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  using Params = ScaledParams<Scales>;
  static constexpr bool kScalesOfSlots = kCopiesScales<Scales>, kCutsK = kIsDense;
};

// The shared memory after the barriers, in place of notes.
template <GroupedGemmConfig kConfig>
struct WgradShared {
  static constexpr uint32_t kScales = GemmShared<kConfig>::kNotes, kPlaces = kScales + ScaleMemory<kConfig>::kBytes;
  static constexpr uint32_t kBytes = kPlaces + PlaceMemory::kBytes;
  static_assert(kScales % 8 == 0 && kPlaces % 4 == 0 && kBytes <= 227 * 1024);
};

template <class Op>
__global__ void __cluster_dims__(Op::kConfig.cluster, 1, 1) __launch_bounds__(Op::kConfig.threads, 1)
    expert_wgrad_f8_kernel(const __grid_constant__ typename Op::Params p) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  extern __shared__ __align__(1024) unsigned char shared[];
  const SlotRing<kConfig> ring{smem_addr(shared)};
  const uint32_t warp = threadIdx.x / 32;
  const PlaceMemory places(ring.shared + WgradShared<kConfig>::kPlaces);
  const ScaleMemory<kConfig> scales{ring.shared + WgradShared<kConfig>::kScales};
  if (threadIdx.x == 0) {
    places.init();
    ResultMemory<kConfig>{ring}.init(Op::kScalesOfSlots ? 1 + 32 : 1);
  }
  __syncwarp();
  cluster_sync();
  if (warp < 4) {
    fewer_registers<kConfig.producer_registers>();
    if (warp == 0 && elect_one()) load<Op>(p, ring, places);
    if constexpr (!Op::kCutsK) {
      if (warp == 1) find_places<kConfig>(p, places);
    }
    if constexpr (Op::kScalesOfSlots) {
      if (warp == 2) load_scales<Op>(p, ring, places, scales);
    }
  } else {
    more_registers<kConfig.consumer_registers>();
    consume<Op>(p, ring, places, scales);
  }
  __syncwarp();
  cluster_sync();  // the other block may still arrive at this one's barriers
}

template <class Op>
struct WgradLaunch {
  int blocks =
      persistent_blocks(reinterpret_cast<const void*>(&expert_wgrad_f8_kernel<Op>), WgradShared<Op::kConfig>::kBytes);
};

// dw of the tiles that are cut: the sums of their parts in order, stored or added. A block computes kAddedRows rows
// of a tile, and a thread four neighbouring columns of every fourth of them.
constexpr int kAddedRows = 16, kAddThreads = 256;
struct AddedParts {
  float* dw;            // [num_rows, columns]
  const float4* parts;  // [cut, num_parts, 256, 64]
  int32_t num_rows, columns;
  int32_t whole, num_parts;
  int32_t clusters_down, across;
  bool accumulate;
};

__device__ __forceinline__ float4 plus(float4 x, float4 y) {
  return make_float4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}

__global__ void __launch_bounds__(kAddThreads) add_parts_kernel(const AddedParts p) {
  constexpr GroupedGemmConfig kConfig = kSm90WgradF8;
  constexpr int kTile = static_cast<int>(WgradParts::kTile), kRowsAtOnce = kAddThreads / (kTile / 4);
  static_assert(kTile == 2 * kConfig.tile_m && kTile == kConfig.tile_n && kTile % kAddedRows == 0);
  const auto number = static_cast<int32_t>(blockIdx.y);
  const GridStep at = grouped_step(p.whole + number, p.clusters_down, p.across, kConfig.l2_group);
  const int32_t quad = static_cast<int32_t>(threadIdx.x) % (kTile / 4), column = at.col * kTile + 4 * quad;
  if (column >= p.columns) return;
  const int32_t first = static_cast<int32_t>(blockIdx.x) * kAddedRows + static_cast<int32_t>(threadIdx.x) / (kTile / 4);
#pragma unroll
  for (int i = 0; i < kAddedRows; i += kRowsAtOnce) {
    const int32_t row = at.row * kTile + first + i;
    if (row >= p.num_rows) return;
    const float4* part = p.parts + (int64_t{number} * p.num_parts * kTile + first + i) * (kTile / 4) + quad;
    float4 sum = *part;
#pragma unroll 4
    for (int32_t n = 1; n < p.num_parts; ++n) sum = plus(sum, part[int64_t{n} * kTile * (kTile / 4)]);
    auto* const to = reinterpret_cast<float4*>(p.dw + int64_t{row} * p.columns + column);
    *to = p.accumulate ? plus(*to, sum) : sum;
  }
}

void add_parts(Stream& s, const WgradProductF8& a, const WgradParams& p, const char* who) {
  const AddedParts added{.dw = a.dw_eMN.ptr<float>(),
                         .parts = static_cast<const float4*>(a.scratch.data),
                         .num_rows = p.num_rows,
                         .columns = static_cast<int32_t>(a.dw_eMN.dim(2)),
                         .whole = p.whole,
                         .num_parts = p.parts,
                         .clusters_down = p.clusters_down,
                         .across = p.across,
                         .accumulate = a.accumulate};
  const dim3 grid(static_cast<uint32_t>(WgradParts::kTile / kAddedRows), static_cast<uint32_t>(p.cut));
  add_parts_kernel<<<grid, kAddThreads, 0, cuda_stream(s)>>>(added);
  check_launch(who);
}

void cut_tiles(WgradParams& p, const WgradProductF8& a) {
  const WgradParts parts = wgrad_parts(a.dw_eMN.dim(1), a.dw_eMN.dim(2), a.left_MR.data.dim(1));
  p.whole = static_cast<int32_t>(parts.whole);
  p.cut = static_cast<int32_t>(parts.cut);
  p.parts = static_cast<int32_t>(parts.parts);
  if (parts.cut == 0) return;
  MOEBIUS_ASSERT(a.scratch.num_bytes() >= parts.scratch_bytes());
  constexpr int64_t kTile = WgradParts::kTile;
  p.dw.parts =
      make_tensor_map<3>(a.scratch.data, {{{kTile, 1, 32}, {kTile, kTile, 16}, {parts.in_all(), kTile * kTile, 1}}},
                         MapOptions{.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32, .element_bytes = 4});
}

template <class Op>
void launch(Stream& s, const WgradProductF8& a, const char* who) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
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
  typename Op::Params p{};
  p.a = rows(a.left_MR, kConfig.tile_m);
  p.b = rows(a.right_NR, kConfig.tile_n / 2);
  p.dw = {.strips = of_dw(kConfig.tile_m), .pieces = of_dw(16), .parts = {}, .accumulate = a.accumulate};
  p.offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>();
  p.num_experts = static_cast<int32_t>(E);
  p.blocks_k = static_cast<int32_t>(div_ceil(a.left_MR.data.dim(1), int64_t{kConfig.tile_k}));
  set_scales(p.scales, a.left_MR, a.right_NR);
  if constexpr (requires { p.scales.blocks_n; }) p.scales.blocks_n = static_cast<int32_t>(a.right_NR.scales.dim(0));
  p.num_rows = static_cast<int32_t>(M);
  p.clusters_down = static_cast<int32_t>(div_ceil(M, 2 * kConfig.tile_m));
  p.across = static_cast<int32_t>(div_ceil(N, kConfig.tile_n));
  if constexpr (Op::kCutsK) cut_tiles(p, a);
  const int blocks = blocks_in_clusters(s, op_state<WgradLaunch<Op>>(s).blocks);
  expert_wgrad_f8_kernel<Op><<<blocks, kConfig.threads, WgradShared<kConfig>::kBytes, cuda_stream(s)>>>(p);
  check_launch(who);
  if constexpr (Op::kCutsK) {
    if (p.cut > 0) add_parts(s, a, p, who);
  }
}

}  // namespace

void wgrad_product_f8(Stream& s, const WgradProductF8& a, const char* who) {
  with_scales_of<BlockScales, TensorScales<WgmmaE5m2>>(a.left_MR, [&]<class Scales>(std::type_identity<Scales>) {
    a.offsets_e1.empty() ? launch<Wgrad<kSm90WgradF8, Scales, /*kIsDense=*/true>>(s, a, who)
                         : launch<Wgrad<kSm90WgradF8, Scales, /*kIsDense=*/false>>(s, a, who);
  });
}

}  // namespace moebius::cuda::sm90
