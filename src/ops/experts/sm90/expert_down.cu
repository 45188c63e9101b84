// expert_down and d_expert_up for sm_90a: contiguous rows times the weights of their expert.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/grouped_gemm/sm90/expert_bias.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {
namespace {

// y = rows B, with B[e] as [N, K] (Major::k) or [K, N] (Major::mn) in memory.
template <Major kMajor, GroupedGemmConfig kOpConfig>
struct RowsGemm {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr bool kGather = false;
  static constexpr Major kMajorB = kMajor;
  static constexpr int kHalf = kConfig.tile_n / 2;  // of the columns

  struct Params {
    CUtensorMap a, b;
    RowTiles tiles;
    int32_t num_k;
    uint16_t* y;
    int32_t N;
    AddedProduct added;
  };

  __device__ static void load_b(const Params& p, const CUtensorMap* map, const SlotLoad& load, uint32_t half, int32_t k,
                                int32_t tile_n, int32_t expert) {
    constexpr uint32_t kHalfBytesB = GemmShared<kConfig>::kHalfBytesB;
    const int32_t n = tile_n * kConfig.tile_n + static_cast<int32_t>(half) * kHalf;
    if constexpr (kMajor == Major::k) {
      load.box(map, half * kHalfBytesB, k * kConfig.tile_k, n, expert);
    } else {
      load.box(map, half * kHalfBytesB, n, k * kConfig.tile_k, expert);
      load.box(map, half * kHalfBytesB + kHalfBytesB / 2, n + kMnMajorCols, k * kConfig.tile_k, expert);
    }
  }

  static constexpr int kPieces = kConfig.tile_n / 64;  // of 64 columns

  template <int kPiece>
  __device__ static void store_piece(const Params& p, HeldRows& held, uint32_t staging) {
    const int32_t n = held.n * kConfig.tile_n + kPiece * 64, chunks = (p.N - n) / 8;
    if (chunks <= 0) return;
    store_box<16 * kPiece>({p.y + static_cast<int64_t>(held.row) * p.N + n, 2 * p.N, held.rows, chunks},
                           staging + kPiece % 2 * 2048, held.words);
  }
};

// y = rows B + bias.
template <Major kMajor, GroupedGemmConfig kOpConfig>
struct BiasedRowsGemm : RowsGemm<kMajor, kOpConfig> {
  struct Params : RowsGemm<kMajor, kOpConfig>::Params {
    ExpertBias bias;
  };

  __device__ __forceinline__ static void load_bias(const Params& p, const TileNote& tile, uint32_t (&pairs)[32]) {
    const int32_t n = tile.n * kOpConfig.tile_n;
    load_bias_pairs(pairs, p.bias, tile.expert, [&](int j) { return n + 8 * j; });
  }
};

// y = rows B of FP8 operands, or y += rows B.
template <bool kAccumulate, GroupedGemmConfig kOpConfig, class Scales>
struct RowsGemmF8 : RowsGemm<Major::k, kOpConfig> {
  using Base = RowsGemm<Major::k, kOpConfig>;
  using Base::kConfig;

  struct Params : Base::Params {
    Scales scales;
  };

  __device__ static int32_t source_row(const Params&, int32_t row) { return row; }
  __device__ static int32_t column_block(const Params&, int32_t n, int half) { return 2 * n + half; }
  __device__ __forceinline__ static void store(const Params& p, float (&sum)[128], const TileNote& tile, int32_t row,
                                               const WarpMemory& memory) {
    if constexpr (kAccumulate) add_stored(p, sum, tile, row);
    HeldRows held;
    held.take(sum, tile, row);
    for_each_constant<0, Base::kPieces>(
        [&](auto piece) { Base::template store_piece<decltype(piece)::value>(p, held, memory.staging); });
  }
  // Adds the stored y to sum.
  __device__ __forceinline__ static void add_stored(const Params& p, float (&sum)[128], const TileNote& tile,
                                                    int32_t row) {
    const auto lane = static_cast<int32_t>(threadIdx.x % 32);
    const int32_t first = tile.n * kConfig.tile_n + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      const int32_t r = row + lane / 4 + i % 2 * 8, n = first + i / 2 * 8;
      if (r >= tile.end_row || n >= p.N) continue;
      const uint32_t y = *reinterpret_cast<const uint32_t*>(p.y + static_cast<int64_t>(r) * p.N + n);
      sum[2 * i] += low_bf16(y);
      sum[2 * i + 1] += high_bf16(y);
    }
  }
  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_scaled<RowsGemmF8>(p, ring, notes);
  }
};

struct Product {
  Tensor y_RN, a_RK, b;
  Rows rows;
  Tensor bias_eC = {};
  int64_t bias_first = 0;
  LowRankTerm added = {};
  RowPart part = {};
};

template <class Op>
void launch(Stream& s, const Product& a, const char* who) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  const int64_t N = a.y_RN.dim(1), K = a.a_RK.dim(1);
  const auto map_of = [&](const Tensor& b) {
    if constexpr (Op::kMajorB == Major::k)
      return weights_map(b, kConfig, Op::kHalf);
    else
      return mn_major_weights_map(b, kConfig);
  };
  typename Op::Params p{};
  p.a = rows_map(a.a_RK, kConfig);
  p.b = map_of(a.b);
  p.tiles = row_tiles(a.rows.offsets_e1, a.a_RK.dim(0), div_ceil(N, kConfig.tile_n), kConfig.l2_group, a.part.runs_2G);
  p.num_k = static_cast<int32_t>(div_ceil(K, kConfig.tile_k));
  p.y = reinterpret_cast<uint16_t*>(a.y_RN.data);
  p.N = static_cast<int32_t>(N);
  add_product(p, a.added.low_RL, a.added.w, map_of);
  if constexpr (requires { p.bias; }) p.bias = expert_bias(a.bias_eC, a.bias_first);
  launch_grouped<Op>(s, p, who);
}

Product product_of(const ExpertDown& a) {
  return {a.y_RD, a.a_RF.data, a.w2_eDF.data, a.rows, a.b2_eC, a.b2_first, a.added, a.part};
}
Product product_of(const DExpertUp& a) {
  return {
      .y_RN = a.dx_RD, .a_RK = a.dh_R2F.data, .b = a.w1_e2FD.data, .rows = a.rows, .added = a.added, .part = a.part};
}

template <Major kMajor, class Op>
void choose_and_launch(Stream& s, const Op& a, const char* who) {
  const Product product = product_of(a);
  with_config<kSm90Rows>(choose_config(describe(a)), who, [&]<GroupedGemmConfig kConfig>() {
    if constexpr (kMajor == Major::k)
      if (!product.bias_eC.empty()) return launch<BiasedRowsGemm<kMajor, kConfig>>(s, product, who);
    launch<RowsGemm<kMajor, kConfig>>(s, product, who);
  });
}

bool takes_product(const Product& a) {
  return takes_rows(a.y_RN) && takes_rows(a.a_RK) && takes_rows(a.b) && takes_num_rows(a.y_RN) &&
         takes_bias(a.bias_eC, a.bias_first);
}

}  // namespace

bool sm90::takes(const ExpertDown& a) { return takes_product(product_of(a)); }
bool sm90::takes(const DExpertUp& a) { return takes_product(product_of(a)); }

void sm90::expert_down(Stream& s, const ExpertDown& a) { choose_and_launch<Major::k>(s, a, "expert_down"); }
void sm90::d_expert_up(Stream& s, const DExpertUp& a) { choose_and_launch<Major::mn>(s, a, "d_expert_up"); }

void sm90::rows_product_f8(Stream& s, const RowsProductF8& a, const char* who) {
  const auto launch = [&]<class Op>(std::type_identity<Op>) {
    constexpr GroupedGemmConfig kConfig = Op::kConfig;
    const int64_t N = a.y_RN.dim(1), K = a.a_RK.data.dim(1);
    typename Op::Params p{};
    p.a = rows_map(a.a_RK.data, kConfig);
    p.b = weights_map(a.b_eNK.data, kConfig, Op::kHalf);
    p.tiles = row_tiles(a.offsets_e1, a.a_RK.data.dim(0), div_ceil(N, kConfig.tile_n), kConfig.l2_group);
    p.num_k = static_cast<int32_t>(div_ceil(K, kConfig.tile_k));
    p.y = reinterpret_cast<uint16_t*>(a.y_RN.data);
    p.N = static_cast<int32_t>(N);
    set_scales(p.scales, a.a_RK, a.b_eNK);
    launch_grouped<Op>(s, p, who);
  };
  with_scales_of<BlockScales, TensorScales<WgmmaE4m3>, TensorScales<WgmmaE5m2>>(
      a.a_RK, [&]<class Scales>(std::type_identity<Scales>) {
        if (a.accumulate)
          launch(std::type_identity<RowsGemmF8<true, kSm90RowsF8, Scales>>{});
        else
          launch(std::type_identity<RowsGemmF8<false, kSm90RowsF8, Scales>>{});
      });
}

}  // namespace moebius::cuda
