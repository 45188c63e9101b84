// d_expert_down for sm_90a: g = dout[token] W2[e] in tiles of 128 rows by 256 columns of F, and the
// backward of the gated activation on each (sm90/d_gated_rows.h). W2 is [D, F], so a tile of it
// is MN-major.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/experts/sm90/d_gated_rows.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {
namespace {

template <bool kGatherRows, GroupedGemmConfig kOpConfig, class Formula = SwigluFormula>
struct DDownGemm {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr bool kGather = kGatherRows;
  static constexpr Major kMajorB = Major::mn;
  static constexpr int kHalf = kConfig.tile_n / 2;  // of the columns
  static constexpr int kLead = 2;                   // K steps before the first piece

  struct Params {
    CUtensorMap a, b;
    Gather gather;
    RowTiles tiles;
    int32_t num_k;
    DGatedParams<Formula> act;
    AddedProduct added;
  };

  __device__ static void load_b(const Params& p, const CUtensorMap* map, const SlotLoad& load, uint32_t half, int32_t k,
                                int32_t tile_n, int32_t expert) {
    constexpr uint32_t kHalfBytesB = GemmShared<kConfig>::kHalfBytesB;
    const int32_t col = tile_n * kConfig.tile_n + static_cast<int32_t>(half) * kHalf;
    load.box(map, half * kHalfBytesB, col, k * kConfig.tile_k, expert);
    load.box(map, half * kHalfBytesB + kHalfBytesB / 2, col + kMnMajorCols, k * kConfig.tile_k, expert);
  }

  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_gradient<DDownGemm>(p, ring, notes);
  }
};

// The kernel for FP8 operands: W2^T is [F, D], so its tiles are K-major. The sums of a tile need most registers until
// its last K step. So the backward of its activation runs after its product, while the other warpgroup continues.
template <bool kGatherRows, GroupedGemmConfig kOpConfig, class Scales>
struct DDownGemmF8 {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr bool kGather = kGatherRows;
  static constexpr Major kMajorB = Major::k;
  static constexpr int kHalf = kConfig.tile_n / 2;

  struct Params : DDownGemm<kGatherRows, kSm90Rows>::Params {
    Scales scales;
  };

  __device__ static void load_b(const Params& p, const CUtensorMap* map, const SlotLoad& load, uint32_t half, int32_t k,
                                int32_t tile_n, int32_t expert) {
    load.box(map, half * GemmShared<kConfig>::kHalfBytesB, k * kConfig.tile_k,
             tile_n * kConfig.tile_n + static_cast<int32_t>(half) * kHalf, expert);
  }
  __device__ static int32_t source_row(const Params& p, int32_t row) {
    return kGatherRows ? __ldg(p.gather.token + row) : row;
  }
  __device__ static int32_t column_block(const Params&, int32_t n, int half) { return 2 * n + half; }

  __device__ __forceinline__ static WarpTile rows_of(const TileNote& tile, int32_t row) {
    return {row, tile.end_row - row, tile.n};
  }
  // Starts the copies of a tile's first gate and up, which overlap with its product. All buffers are free
  // at this point.
  __device__ __forceinline__ static void begin(const Params& p, const TileNote& tile, int32_t row,
                                               const WarpMemory& memory) {
    if (row < tile.end_row && threadIdx.x % 32 == 0)
      fetch_box(p.act, rows_of(tile, row), 0, {memory.staging, memory.barrier});
  }
  __device__ __forceinline__ static void store(const Params& p, const float (&sum)[128], const TileNote& tile,
                                               int32_t row, const WarpMemory& memory) {
    if (row >= tile.end_row) return;
    const WarpPlaces places{memory.staging, memory.barrier};
    HeldGradient<SwigluFormula> held;
    held.take(p.act, sum, rows_of(tile, row));
    for_each_constant<0, kGradientPieces>(
        [&](auto piece) { held.template piece<decltype(piece)::value>(p.act, NoTile{}, places); });
    held.finish(p.act, places);
  }
  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_scaled<DDownGemmF8>(p, ring, notes);
    if (threadIdx.x % 32 == 0) tma_wait<0>();
  }
};

template <class Op>
void launch(Stream& s, const DExpertDown& a) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.data.dim(1);
  const auto num_columns = static_cast<int32_t>(div_ceil(F, kConfig.tile_n));
  const bool weighted = !a.weight_R.empty();
  const auto elements = [](const Tensor& t) { return static_cast<__nv_bfloat16*>(t.data); };
  typename Op::Params p{};
  p.a = rows_map(a.dout_TD.data, kConfig);
  if constexpr (Op::kMajorB == Major::mn) {
    p.b = mn_major_weights_map(a.w2_eDF.data, kConfig);
  } else {
    p.b = weights_map(a.w2_eDF.data, kConfig, Op::kHalf);
    set_scales(p.scales, a.dout_TD, a.w2_eDF);
  }
  p.gather = gather_of(a.dout_TD.data, a.rows.token_R);
  p.tiles = row_tiles(a.rows.offsets_e1, R, num_columns, kConfig.l2_group, a.part.runs_2G);
  p.num_k = static_cast<int32_t>(div_ceil(D, kConfig.tile_k));
  if constexpr (Op::kMajorB == Major::mn)
    add_product(p, a.added.low_RL, a.added.w, [&](const Tensor& w) { return mn_major_weights_map(w, kConfig); });
  const MapOptions box{.swizzle = CU_TENSOR_MAP_SWIZZLE_64B};
  const auto planes = [&](const Tensor& h) {
    return make_tensor_map<3>(h.data, {{{F, 1, kBoxCols}, {2, F, 1}, {R, 2 * F, 16}}}, box);
  };
  p.act = {.h = planes(a.h_R2F),
           .to_dh = planes(a.dh_R2F),
           .to_sa = make_tensor_map<2>(a.sa_RF.data, {{{F, 1, kBoxCols}, {R, F, 16}}}, box),
           .dh = elements(a.dh_R2F),
           .sa = elements(a.sa_RF),
           .weight = weighted ? a.weight_R.ptr<float>() : nullptr,
           .partial = weighted ? static_cast<float*>(a.scratch.data) : nullptr,
           .R = R,
           .F = static_cast<int32_t>(F),
           .steps = std::max(1, p.num_k / kGradientPieces),
           .formula = decltype(p.act.formula)(a.activation)};
  launch_grouped<Op>(s, p, "d_expert_down");
  if (!weighted) return;
  add_dweight_partials(s, a, num_columns);
  add_bias_products(s, a);
}

}  // namespace

bool sm90::takes(const DExpertDown& a) {
  return takes_rows(a.dout_TD.data) && takes_rows(a.w2_eDF.data) && takes_rows(a.h_R2F) && takes_rows(a.sa_RF) &&
         takes_rows(a.dh_R2F) && takes_num_rows(a.sa_RF) && a.dout_TD.data.numel() / 8 < INT32_MAX;
}

void sm90::d_expert_down(Stream& s, const DExpertDown& a) {
  with_config<kSm90Rows>(choose_config(describe(a)), "d_expert_down", [&]<GroupedGemmConfig kConfig>() {
    const auto launch_formula = [&]<class Formula>(std::type_identity<Formula>) {
      a.rows.token_R.empty() ? launch<DDownGemm<false, kConfig, Formula>>(s, a)
                             : launch<DDownGemm<true, kConfig, Formula>>(s, a);
    };
    if (a.activation == GatedActivation{})
      launch_formula(std::type_identity<SwigluFormula>{});
    else
      launch_formula(std::type_identity<ClampedFormula>{});
  });
}

void sm90::d_expert_down_f8(Stream& s, const DExpertDown& a) {
  constexpr const char* who = "d_expert_down";
  const GroupedGemmConfig config = choose_config(describe(a));
  with_scales_of<BlockScales, TensorScales<WgmmaE5m2>>(a.dout_TD, [&]<class Scales>(std::type_identity<Scales>) {
    if (a.rows.token_R.empty()) {
      with_config<kSm90RowsF8>(config, who,
                               [&]<GroupedGemmConfig kConfig>() { launch<DDownGemmF8<false, kConfig, Scales>>(s, a); });
    } else {
      with_config<kSm90GatheredRowsF8>(
          config, who, [&]<GroupedGemmConfig kConfig>() { launch<DDownGemmF8<true, kConfig, Scales>>(s, a); });
    }
  });
}

}  // namespace moebius::cuda
