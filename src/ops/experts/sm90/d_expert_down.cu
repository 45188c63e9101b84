// d_expert_down for sm_90a: g = dout[token] W2[e] in tiles of 128 rows by 256 columns of F, and the
// backward of the gated activation on each (sm90/d_swiglu_rows.h). W2 is [D, F], so a tile of it
// is MN-major.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/experts/sm90/d_swiglu_rows.h"
#include "ops/grouped_gemm/sm90/launch.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {
namespace {

template <bool kGatherRows, GroupedGemmConfig kOpConfig>
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
    DSwigluParams act;
  };

  __device__ static void load_b(const Params& p, const SlotLoad& load, uint32_t half, int32_t k, int32_t tile_n,
                                int32_t expert) {
    constexpr uint32_t kHalfBytesB = GemmShared<kConfig>::kHalfBytesB;
    const int32_t col = tile_n * kConfig.tile_n + static_cast<int32_t>(half) * kHalf;
    load.box(&p.b, half * kHalfBytesB, col, k * kConfig.tile_k, expert);
    load.box(&p.b, half * kHalfBytesB + kHalfBytesB / 2, col + kMnMajorCols, k * kConfig.tile_k, expert);
  }

  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_gradient<DDownGemm>(p, ring, notes);
  }
};

template <bool kGatherRows, GroupedGemmConfig kConfig>
void launch(Stream& s, const DExpertDown& a) {
  using Op = DDownGemm<kGatherRows, kConfig>;
  constexpr uint32_t kTileK = kConfig.tile_k;
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.data.dim(1), E = a.w2_eDF.data.dim(0);
  const auto num_columns = static_cast<int32_t>(div_ceil(F, kConfig.tile_n));
  const bool weighted = !a.weight_R.empty();
  const auto elements = [](const Tensor& t) { return static_cast<__nv_bfloat16*>(t.data); };
  typename Op::Params p{};
  p.a = rows_map(a.dout_TD.data, kConfig);
  p.b = make_tensor_map<3>(a.w2_eDF.data.data, {{{F, 1, kMnMajorCols}, {D, F, kTileK}, {E, D * F, 1}}});
  p.gather = {static_cast<const char*>(a.dout_TD.data.data), index_of(a.rows), static_cast<int32_t>(D / 8)};
  p.tiles = row_tiles(a.rows.offsets_e1, R, num_columns, kConfig.l2_group);
  p.num_k = static_cast<int32_t>(div_ceil(D, kConfig.tile_k));
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
           .steps = std::max(1, p.num_k / kGradientPieces)};
  launch_grouped<Op>(s, p, "d_expert_down");
  if (weighted) add_dweight_partials(s, a, num_columns);
}

}  // namespace

bool sm90::takes(const DExpertDown& a) {
  return takes_rows(a.dout_TD.data) && takes_rows(a.w2_eDF.data) && takes_rows(a.h_R2F) && takes_rows(a.sa_RF) &&
         takes_rows(a.dh_R2F) && takes_num_rows(a.sa_RF) && a.dout_TD.data.numel() / 8 < INT32_MAX;
}

void sm90::d_expert_down(Stream& s, const DExpertDown& a) {
  with_config<kSm90Rows>(choose_config(describe(a)), "d_expert_down", [&]<GroupedGemmConfig kConfig>() {
    a.rows.token_R.empty() ? launch<false, kConfig>(s, a) : launch<true, kConfig>(s, a);
  });
}

}  // namespace moebius::cuda
