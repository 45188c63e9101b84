// d_expert_down with mma.sync: g = dout[token] W2[e], and the backward of the gated activation on each warp's tile of
// it. W2 is [D, F], so k is not contiguous in it.
#include "ops/experts/sm80/gated_words.h"
#include "ops/experts/sm80/operands.h"

namespace moebius::cuda::sm80 {
namespace {

template <PortableGemmConfig kOpConfig, bool kOpInChunks>
struct DDownGemm {
  static constexpr PortableGemmConfig kConfig = kOpConfig;
  static constexpr bool kInChunks = kOpInChunks;
  static constexpr Cut kCut = Cut::m;
  static constexpr Major kMajorA = Major::k, kMajorB = Major::mn;
  using CopyA = RowsAlongK<kConfig.tile_m, kConfig.tile_k, kConfig.threads(), KeptRows, kInChunks>;
  using CopyB = RowsAcrossK<kConfig.tile_n, kConfig.tile_k, kConfig.threads(), false, kInChunks>;
  static_assert(kDWeightCols == 64, "a warp has the columns of one partial sum");

  struct Params {
    Tiles tiles;
    Source dout;
    Weights w2;
    WordActivation activation;
    const uint16_t* h;
    uint16_t *dh, *sa;
    const float* weight;  // null: 1
    float* partial;       // [columns of F / 64, R]; null: not wanted
    int64_t R;
    int32_t F;
  };

  __device__ __forceinline__ static Units units(const Params& p) { return {p.dout.width.unit, p.w2.width.unit}; }
  __device__ __forceinline__ static void open(const Params& p, CopyA& a, CopyB& b, const Tile& tile) {
    open_rows(a, p.dout, tile);
    b.open(p.w2.of(tile.expert), nullptr, p.w2.width, static_cast<uint32_t>(tile.n * (kConfig.tile_n / 8)), 0,
           p.w2.rows);
  }

  __device__ __forceinline__ static void begin(const Params&, const Tile&, WarpSums& sums) { clear_sums(sums); }

  // The gate and up of a row in this lane's low and high columns.
  struct LaneInputs {
    uint32_t gate[2][4], up[2][4];
    float weight;

    __device__ __forceinline__ void load(const Params& p, int32_t row, int32_t end_row, int32_t col) {
      const bool there = row < end_row;
      const uint16_t* h = p.h + int64_t{row} * 2 * p.F + col;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        load_columns(gate[half], h + half * 32, there, p.F - col - half * 32);
        load_columns(up[half], h + half * 32 + p.F, there, p.F - col - half * 32);
      }
      weight = there && p.weight != nullptr ? __ldg(p.weight + row) : 1.0f;
    }
    // The first n of eight columns if there, and zeros in place of the others.
    __device__ __forceinline__ static void load_columns(uint32_t (&to)[4], const uint16_t* from, bool there,
                                                        int32_t n) {
      if constexpr (!kInChunks) return load_elements(to, from, there ? n : 0);
      const uint4 chunk = fetch_word(reinterpret_cast<const uint4*>(from), there && n > 0);
      to[0] = chunk.x, to[1] = chunk.y, to[2] = chunk.z, to[3] = chunk.w;
    }
  };

  // Processes eight columns: stores dh and sa, and adds g a to sum.
  __device__ __forceinline__ static void backward(const Params& p, int32_t row, int32_t col, float& sum,
                                                  const uint32_t (&g)[4], const uint32_t (&gate)[4],
                                                  const uint32_t (&up)[4], float weight) {
    const Elements from_g(g);
    float da[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) da[i] = __fmul_rn(weight, from_g.x[i]);
    ActivationGradients of(p.activation, da, gate, up);
    uint32_t word[4];
    uint16_t* dh = p.dh + int64_t{row} * 2 * p.F + col;
    pack(word, of.dgate);
    store_columns<kInChunks>(dh, word, p.F - col);
    pack(word, of.dup);
    store_columns<kInChunks>(dh + p.F, word, p.F - col);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      sum += from_g.x[i] * of.a[i];
      of.a[i] = __fmul_rn(weight, of.a[i]);
    }
    pack(word, of.a);
    store_columns<kInChunks>(p.sa + int64_t{row} * p.F + col, word, p.F - col);
  }

  __device__ __forceinline__ static void store(const Params& p, const Tile& tile, const WarpSums& sums) {
    const int32_t first_col = tile.n * kConfig.tile_n + WarpPlace<kConfig>::col(), col = first_col + col_of_lane();
    const int32_t first_row = tile.m + WarpPlace<kConfig>::row();
    if (first_col >= p.F) return;
    LaneInputs next;
    next.load(p, first_row + row_of_lane(0), tile.end_m, col);
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const LaneInputs in = next;
      if (i + 1 < kRowsOfLane) next.load(p, first_row + row_of_lane(i + 1), tile.end_m, col);
      const RowChunks g = row_chunks(sums, i);
      const int32_t row = first_row + row_of_lane(i);
      const bool there = row < tile.end_m;
      float sum = 0;
      if (there && col < p.F) backward(p, row, col, sum, g.low, in.gate[0], in.up[0], in.weight);
      if (there && col + 32 < p.F) backward(p, row, col + 32, sum, g.high, in.gate[1], in.up[1], in.weight);
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (there && p.partial != nullptr && threadIdx.x % 4 == 0) {
        p.partial[first_col / kDWeightCols * p.R + row] = sum;
      }
    }
  }
};

template <PortableGemmConfig kConfig, bool kInChunks>
void launch(Stream& s, const DExpertDown& a) {
  using Op = DDownGemm<kConfig, kInChunks>;
  const int64_t R = a.sa_RF.dim(0), F = a.sa_RF.dim(1), D = a.dout_TD.data.dim(1);
  const bool weighted = !a.weight_R.empty();
  const typename Op::Params p{.tiles = make_tiles(a.rows.offsets_e1, R, R, D, div_ceil(F, kConfig.tile_n)),
                              .dout = source_of(a.dout_TD.data, index_of(a.rows)),
                              .w2 = weights_of(a.w2_eDF.data),
                              .activation = WordActivation(a.activation),
                              .h = halves(a.h_R2F),
                              .dh = halves(a.dh_R2F),
                              .sa = halves(a.sa_RF),
                              .weight = weighted ? a.weight_R.ptr<float>() : nullptr,
                              .partial = weighted ? static_cast<float*>(a.scratch.data) : nullptr,
                              .R = R,
                              .F = static_cast<int32_t>(F)};
  launch_portable<Op>(s, p, "d_expert_down");
}

}  // namespace

bool takes(const DExpertDown& a) {
  return takes_matrix(a.dout_TD.data) && takes_weights(a.w2_eDF.data) && takes_matrix(a.h_R2F) &&
         takes_matrix(a.sa_RF) && takes_matrix(a.dh_R2F);
}

void d_expert_down(Stream& s, const DExpertDown& a) {
  const bool in_chunks = are_in_chunks(a.dout_TD.data, a.w2_eDF.data, a.h_R2F, a.dh_R2F, a.sa_RF);
  with_portable_config(s, describe(a), in_chunks,
                       [&]<PortableGemmConfig kConfig, bool kInChunks>() { launch<kConfig, kInChunks>(s, a); });
  if (a.weight_R.empty()) return;
  add_dweight_partials(s, a, num_dweight_partials(a));
  add_bias_products(s, a);
}

}  // namespace moebius::cuda::sm80
