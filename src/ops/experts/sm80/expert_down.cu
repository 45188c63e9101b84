// expert_down and d_expert_up with mma.sync: contiguous rows times the weights of their expert.
#include "ops/experts/sm80/operands.h"
#include "ops/grouped_gemm/sm80/warp_rows.h"

namespace moebius::cuda::sm80 {
namespace {

// y = rows B + bias, with B[e] as [N, K] (Major::k) or [K, N] (Major::mn) in memory.
template <Major kMajor, PortableGemmConfig kOpConfig, bool kOpInChunks>
struct RowsGemm {
  static constexpr PortableGemmConfig kConfig = kOpConfig;
  static constexpr bool kInChunks = kOpInChunks;
  static constexpr Cut kCut = Cut::m;
  static constexpr Major kMajorA = Major::k, kMajorB = kMajor;
  template <int kRows>
  using AlongK = RowsAlongK<kRows, kConfig.tile_k, kConfig.threads(), NeighbouringRows, kInChunks>;
  using CopyA = AlongK<kConfig.tile_m>;
  using CopyB = std::conditional_t<kMajor == Major::k, AlongK<kConfig.tile_n>,
                                   RowsAcrossK<kConfig.tile_n, kConfig.tile_k, kConfig.threads(), false, kInChunks>>;

  struct Params {
    Tiles tiles;
    Source rows;
    Weights w;
    ColumnBias bias;
    uint16_t* y;
    int32_t N;
  };

  __device__ __forceinline__ static Units units(const Params& p) { return {p.rows.width.unit, p.w.width.unit}; }
  __device__ __forceinline__ static void open(const Params& p, CopyA& a, CopyB& b, const Tile& tile) {
    a.open(p.rows.rows, p.rows.width, {tile.m + static_cast<int32_t>(CopyA::first_row()), tile.end_m - 1});
    const int32_t first = tile.n * kConfig.tile_n;
    if constexpr (kMajor == Major::k) {
      b.open(p.w.of(tile.expert), p.w.width, {first + static_cast<int32_t>(CopyB::first_row()), p.N - 1});
    } else {
      b.open(p.w.of(tile.expert), nullptr, p.w.width, static_cast<uint32_t>(first / 8), 0, p.w.rows);
    }
  }

  __device__ __forceinline__ static int32_t first_col(const Tile& tile) {
    return tile.n * kConfig.tile_n + WarpPlace<kConfig>::col();
  }
  __device__ __forceinline__ static void begin(const Params& p, const Tile& tile, WarpSums& sums) {
    const int32_t col = first_col(tile) + static_cast<int32_t>(threadIdx.x % 4) * 2;
    begin_sums(sums, p.bias, tile.expert, [&](int j) { return col + j * 8; });
  }

  __device__ __forceinline__ static void store(const Params& p, const Tile& tile, const WarpSums& sums) {
    const int32_t col = first_col(tile) + col_of_lane(), first_row = tile.m + WarpPlace<kConfig>::row();
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const RowChunks row = row_chunks(sums, i);
      const int32_t r = first_row + row_of_lane(i);
      if (r >= tile.end_m) continue;
      uint16_t* y = p.y + int64_t{r} * p.N + col;
      if (col < p.N) store_columns<kInChunks>(y, row.low, p.N - col);
      if (col + 32 < p.N) store_columns<kInChunks>(y + 32, row.high, p.N - col - 32);
    }
  }
};

struct Product {
  Tensor y_RN, a_RK, b, bias_eC;
  int64_t bias_first;
  Rows rows;
};

Product product_of(const ExpertDown& a) { return {a.y_RD, a.a_RF.data, a.w2_eDF.data, a.b2_eC, a.b2_first, a.rows}; }
Product product_of(const DExpertUp& a) { return {a.dx_RD, a.dh_R2F.data, a.w1_e2FD.data, {}, 0, a.rows}; }

template <Major kMajor, PortableGemmConfig kConfig, bool kInChunks>
void launch(Stream& s, const Product& a, const char* who) {
  using Op = RowsGemm<kMajor, kConfig, kInChunks>;
  const int64_t R = a.y_RN.dim(0), N = a.y_RN.dim(1), K = a.a_RK.dim(1);
  const typename Op::Params p{.tiles = make_tiles(a.rows.offsets_e1, R, R, K, div_ceil(N, kConfig.tile_n)),
                              .rows = source_of(a.a_RK, nullptr),
                              .w = weights_of(a.b),
                              .bias = column_bias(a.bias_eC, a.bias_first),
                              .y = halves(a.y_RN),
                              .N = static_cast<int32_t>(N)};
  launch_portable<Op>(s, p, who);
}

template <Major kMajor, class Op>
void choose_and_launch(Stream& s, const Op& a, const char* who) {
  const Product product = product_of(a);
  with_portable_config(
      s, describe(a), are_in_chunks(product.a_RK, product.b, product.y_RN),
      [&]<PortableGemmConfig kConfig, bool kInChunks>() { launch<kMajor, kConfig, kInChunks>(s, product, who); });
}

bool takes_product(const Product& a) { return takes_matrix(a.y_RN) && takes_matrix(a.a_RK) && takes_weights(a.b); }

}  // namespace

bool takes(const ExpertDown& a) { return takes_product(product_of(a)); }
bool takes(const DExpertUp& a) { return takes_product(product_of(a)); }

void expert_down(Stream& s, const ExpertDown& a) { choose_and_launch<Major::k>(s, a, "expert_down"); }
void d_expert_up(Stream& s, const DExpertUp& a) { choose_and_launch<Major::mn>(s, a, "d_expert_up"); }

}  // namespace moebius::cuda::sm80
