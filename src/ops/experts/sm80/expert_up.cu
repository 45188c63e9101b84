// expert_up with mma.sync: the 64 columns of a warp are 32 gate columns and the 32 up columns of the same
// f, so that a lane holds both, and the activation needs no exchange.
#include "ops/experts/sm80/gated_words.h"
#include "ops/experts/sm80/operands.h"

namespace moebius::cuda::sm80 {
namespace {

// The rows of W1 in a tile: 32 gate rows and the 32 up rows of the same f in turns, but none past the last f.
template <int kCopies, int kRowsAtOnce>
class GateAndUpRows {
 public:
  static_assert(32 % kRowsAtOnce == 0 || kRowsAtOnce % 64 == 0);
  // first: the first of these rows; first_f: the f of the tile's first row.
  __device__ __forceinline__ GateAndUpRows(int32_t first, int32_t first_f, int32_t F)
      : f_(first_f + first / 64 * 32 + first % 32), up_(first / 32 % 2 * F), F_(F) {}
  GateAndUpRows() = default;
  __device__ __forceinline__ int32_t row(int i) const {
    if constexpr (kRowsAtOnce <= 32) {
      const int32_t at = i * kRowsAtOnce;
      return min(f_ + at / 64 * 32 + at % 32, F_ - 1) + at / 32 % 2 * F_;
    }
    return min(f_ + i * (kRowsAtOnce / 2), F_ - 1) + up_;
  }

 private:
  int32_t f_ = 0, up_ = 0, F_ = 0;
};

template <PortableGemmConfig kOpConfig, bool kOpInChunks>
struct UpGemm {
  static constexpr PortableGemmConfig kConfig = kOpConfig;
  static constexpr bool kInChunks = kOpInChunks;
  static constexpr Cut kCut = Cut::m;
  static constexpr Major kMajorA = Major::k, kMajorB = Major::k;
  static constexpr int kCols = kConfig.tile_n / 2;  // f of a tile
  using CopyA = RowsAlongK<kConfig.tile_m, kConfig.tile_k, kConfig.threads(), KeptRows, kInChunks>;
  using CopyB = RowsAlongK<kConfig.tile_n, kConfig.tile_k, kConfig.threads(), GateAndUpRows, kInChunks>;

  struct Params {
    Tiles tiles;
    Source x;
    Weights w1;
    ColumnBias bias;
    WordActivation activation;
    uint16_t *h, *a;
    int32_t F;
  };

  __device__ __forceinline__ static Units units(const Params& p) { return {p.x.width.unit, p.w1.width.unit}; }
  __device__ __forceinline__ static void open(const Params& p, CopyA& a, CopyB& b, const Tile& tile) {
    open_rows(a, p.x, tile);
    b.open(p.w1.of(tile.expert), p.w1.width, {static_cast<int32_t>(CopyB::first_row()), tile.n * kCols, p.F});
  }

  __device__ __forceinline__ static int32_t first_f(const Tile& tile) {
    return tile.n * kCols + WarpPlace<kConfig>::col() / 2;
  }
  __device__ __forceinline__ static void begin(const Params& p, const Tile& tile, WarpSums& sums) {
    const int32_t f = first_f(tile) + static_cast<int32_t>(threadIdx.x % 4) * 2;
    // Columns past F are not stored, so their initial values do not matter.
    begin_sums(sums, p.bias, tile.expert, [&](int j) { return j / 4 * p.F + f + j % 4 * 8; });
  }

  __device__ __forceinline__ static void store(const Params& p, const Tile& tile, const WarpSums& sums) {
    const int32_t f = first_f(tile) + col_of_lane(), first_row = tile.m + WarpPlace<kConfig>::row();
#pragma unroll
    for (int i = 0; i < kRowsOfLane; ++i) {
      const RowChunks row = row_chunks(sums, i);
      const int32_t r = first_row + row_of_lane(i);
      if (r >= tile.end_m || f >= p.F) continue;
      uint16_t* h = p.h + int64_t{r} * 2 * p.F + f;
      store_columns<kInChunks>(h, row.low, p.F - f);
      store_columns<kInChunks>(h + p.F, row.high, p.F - f);
      uint32_t a[4];
      activate(a, p.activation, row.low, row.high);
      store_columns<kInChunks>(p.a + int64_t{r} * p.F + f, a, p.F - f);
    }
  }
};

template <PortableGemmConfig kConfig, bool kInChunks>
void launch(Stream& s, const ExpertUp& a) {
  using Op = UpGemm<kConfig, kInChunks>;
  const int64_t D = a.x_TD.data.dim(1), F = a.a_RF.dim(1), R = a.a_RF.dim(0);
  const typename Op::Params p{.tiles = make_tiles(a.rows.offsets_e1, R, R, D, div_ceil(F, Op::kCols)),
                              .x = source_of(a.x_TD.data, index_of(a.rows)),
                              .w1 = weights_of(a.w1_e2FD.data),
                              .bias = column_bias(a.b1_e2F, 0),
                              .activation = WordActivation(a.activation),
                              .h = halves(a.h_R2F),
                              .a = halves(a.a_RF),
                              .F = static_cast<int32_t>(F)};
  launch_portable<Op>(s, p, "expert_up");
}

}  // namespace

bool takes(const ExpertUp& a) {
  return takes_matrix(a.x_TD.data) && takes_weights(a.w1_e2FD.data) && takes_matrix(a.a_RF) && takes_matrix(a.h_R2F);
}

void expert_up(Stream& s, const ExpertUp& a) {
  const bool in_chunks = are_in_chunks(a.x_TD.data, a.w1_e2FD.data, a.h_R2F, a.a_RF);
  with_portable_config(s, describe(a), in_chunks,
                       [&]<PortableGemmConfig kConfig, bool kInChunks>() { launch<kConfig, kInChunks>(s, a); });
}

}  // namespace moebius::cuda::sm80
