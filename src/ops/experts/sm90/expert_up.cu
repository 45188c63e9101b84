// expert_up for sm_90a: the 256 columns of a tile are 128 gate columns and the 128 up columns of
// the same f, so that a thread holds both and the activation needs no exchange.
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/experts/sm90/gated_formula.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/grouped_gemm/sm90/expert_bias.h"
#include "ops/grouped_gemm/sm90/launch.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {
namespace {

template <bool kGatherRows, GroupedGemmConfig kOpConfig, class Formula = SwigluFormula>
struct UpGemm {
  static constexpr GroupedGemmConfig kConfig = kOpConfig;
  static constexpr bool kGather = kGatherRows;
  static constexpr Major kMajorB = Major::k;
  static constexpr int kCols = kConfig.tile_n / 2;  // f of a tile

  struct Params {
    CUtensorMap a, b;
    Gather gather;
    RowTiles tiles;
    int32_t num_k;
    uint16_t *h, *act;
    int32_t F;
    Formula formula;
    AddedProduct added;
  };

  // Half 0 is the gate's, half 1 the up's.
  __device__ static void load_b(const Params& p, const CUtensorMap* map, const SlotLoad& load, uint32_t half, int32_t k,
                                int32_t tile_n, int32_t expert) {
    load.box(map, half * GemmShared<kConfig>::kHalfBytesB, k * kConfig.tile_k,
             static_cast<int32_t>(half) * p.F + tile_n * kCols, expert);
  }

  // Four pieces store each half of the columns: gate, up, half of the activation, in the gate's
  // place, the rest and its store.
  static constexpr int kPieces = 8;

  template <int kPiece>
  __device__ __forceinline__ static void store_piece(const Params& p, HeldRows& held, uint32_t staging) {
    constexpr int kHalf = kPiece / 4, kPart = kPiece % 4, kGate = 16 * kHalf, kUp = 32 + kGate;
    const int32_t f = held.n * kCols + kHalf * (kCols / 2), chunks = (p.F - f) / 8;
    if (chunks <= 0) return;
    uint16_t* h = p.h + static_cast<int64_t>(held.row) * 2 * p.F + f;
    if constexpr (kPart == 0) store_box<kGate>({h, 4 * p.F, held.rows, chunks}, staging, held.words);
    if constexpr (kPart == 1) store_box<kUp>({h + p.F, 4 * p.F, held.rows, chunks}, staging + 2048, held.words);
    if constexpr (kPart >= 2) {
      constexpr int kFirst = 8 * (kPart - 2);
#pragma unroll
      for (int i = kFirst; i < kFirst + 8; i += 2) {
        activate(p.formula, held.words[kGate + i], held.words[kGate + i + 1], held.words[kUp + i],
                 held.words[kUp + i + 1]);
      }
    }
    if constexpr (kPart == 3) {
      uint16_t* act = p.act + static_cast<int64_t>(held.row) * p.F + f;
      store_box<kGate>({act, 2 * p.F, held.rows, chunks}, staging, held.words);
    }
  }

  // Replaces two words of gate by the activation of gate and up. Each step is computed for all four elements before the
  // next one. Few registers are left, and the compiler would otherwise save them by processing one element at a time,
  // with longer waits.
  __device__ __forceinline__ static void activate(const Formula& f, uint32_t& gate0, uint32_t& gate1, uint32_t up0,
                                                  uint32_t up1) {
    float s[4] = {f.logit(low_bf16(gate0)), f.logit(high_bf16(gate0)), f.logit(low_bf16(gate1)),
                  f.logit(high_bf16(gate1))};
    approximate_sigmoids(s);
    gate0 = activated(f, gate0, up0, s[0], s[1]);
    gate1 = activated(f, gate1, up1, s[2], s[3]);
  }
  __device__ __forceinline__ static uint32_t activated(const Formula& f, uint32_t gate, uint32_t up, float z0,
                                                       float z1) {
    return pack_bf16(f.value(low_bf16(gate), z0, low_bf16(up)), f.value(high_bf16(gate), z1, high_bf16(up)));
  }
};

// The kernel with a bias and any activation.
template <bool kGatherRows, GroupedGemmConfig kOpConfig>
struct BiasedUpGemm : UpGemm<kGatherRows, kOpConfig, ClampedFormula> {
  using Base = UpGemm<kGatherRows, kOpConfig, ClampedFormula>;

  struct Params : Base::Params {
    ExpertBias bias;
  };

  __device__ __forceinline__ static void load_bias(const Params& p, const TileNote& tile, uint32_t (&pairs)[32]) {
    const int32_t f = tile.n * Base::kCols;
    // Columns past F are not stored, so their bias does not matter.
    load_bias_pairs(pairs, p.bias, tile.expert, [&](int j) { return j / 16 * p.F + f + j % 16 * 8; });
  }
};

// The kernel for E4M3 operands. With BlockScales the gate and the up of a tile have separate blocks of weights, so F is
// a multiple of the block width.
template <bool kGatherRows, GroupedGemmConfig kOpConfig, class Scales>
struct UpGemmF8 : UpGemm<kGatherRows, kOpConfig> {
  using Base = UpGemm<kGatherRows, kOpConfig>;
  using Base::kConfig;

  struct Params : Base::Params {
    Scales scales;
  };

  __device__ static int32_t source_row(const Params& p, int32_t row) {
    return kGatherRows ? __ldg(p.gather.token + row) : row;
  }
  __device__ static int32_t column_block(const Params& p, int32_t n, int half) {
    return half * (p.scales.blocks_n / 2) + n;
  }
  __device__ __forceinline__ static void store(const Params& p, const float (&sum)[128], const TileNote& tile,
                                               int32_t row, const WarpMemory& memory) {
    HeldRows held;
    held.take(sum, tile, row);
    for_each_constant<0, Base::kPieces>(
        [&](auto piece) { Base::template store_piece<decltype(piece)::value>(p, held, memory.staging); });
  }
  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_scaled<UpGemmF8>(p, ring, notes);
  }
};

template <class Op>
void launch(Stream& s, const ExpertUp& a) {
  constexpr GroupedGemmConfig kConfig = Op::kConfig;
  const int64_t D = a.x_TD.data.dim(1), F = a.a_RF.dim(1);
  typename Op::Params p{};
  p.a = rows_map(a.x_TD.data, kConfig);
  p.b = weights_map(a.w1_e2FD.data, kConfig, Op::kCols);
  p.gather = gather_of(a.x_TD.data, a.rows.token_R);
  p.tiles = row_tiles(a.rows.offsets_e1, a.a_RF.dim(0), div_ceil(F, Op::kCols), kConfig.l2_group, a.part.runs_2G);
  p.num_k = static_cast<int32_t>(div_ceil(D, kConfig.tile_k));
  p.h = reinterpret_cast<uint16_t*>(a.h_R2F.data);
  p.act = reinterpret_cast<uint16_t*>(a.a_RF.data);
  p.F = static_cast<int32_t>(F);
  p.formula = decltype(p.formula)(a.activation);
  add_product(p, a.added.low_RL, a.added.w, [&](const Tensor& w) { return weights_map(w, kConfig, Op::kCols); });
  if constexpr (requires { p.bias; }) p.bias = expert_bias(a.b1_e2F, 0);
  if constexpr (requires { p.scales; }) set_scales(p.scales, a.x_TD, a.w1_e2FD);
  launch_grouped<Op>(s, p, "expert_up");
}

}  // namespace

bool sm90::takes(const ExpertUp& a) {
  return takes_rows(a.x_TD.data) && takes_rows(a.w1_e2FD.data) && takes_rows(a.a_RF) && takes_rows(a.h_R2F) &&
         takes_num_rows(a.a_RF) && takes_bias(a.b1_e2F, 0) && a.x_TD.data.numel() / 8 < INT32_MAX;
}

void sm90::expert_up(Stream& s, const ExpertUp& a) {
  constexpr const char* who = "expert_up";
  const GroupedGemmConfig config = choose_config(describe(a));
  const bool is_swiglu = a.activation == GatedActivation{} && a.b1_e2F.empty();
  if (a.rows.token_R.empty()) {
    with_config<kSm90Rows>(config, who, [&]<GroupedGemmConfig kConfig>() {
      is_swiglu ? launch<UpGemm<false, kConfig>>(s, a) : launch<BiasedUpGemm<false, kConfig>>(s, a);
    });
  } else {
    with_config<kSm90GatheredRows>(config, who, [&]<GroupedGemmConfig kConfig>() {
      is_swiglu ? launch<UpGemm<true, kConfig>>(s, a) : launch<BiasedUpGemm<true, kConfig>>(s, a);
    });
  }
}

void sm90::expert_up_f8(Stream& s, const ExpertUp& a) {
  constexpr const char* who = "expert_up";
  const GroupedGemmConfig config = choose_config(describe(a));
  with_scales_of<BlockScales, TensorScales<WgmmaE4m3>>(a.x_TD, [&]<class Scales>(std::type_identity<Scales>) {
    if (a.rows.token_R.empty()) {
      with_config<kSm90RowsF8>(config, who,
                               [&]<GroupedGemmConfig kConfig>() { launch<UpGemmF8<false, kConfig, Scales>>(s, a); });
    } else {
      with_config<kSm90GatheredRowsF8>(
          config, who, [&]<GroupedGemmConfig kConfig>() { launch<UpGemmF8<true, kConfig, Scales>>(s, a); });
    }
  });
}

}  // namespace moebius::cuda
