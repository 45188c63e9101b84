// The product of d_expert_down_quantised for sm_90a, of E4M3 operands: it stores
//   g[r,:] = W2[e]^T dout[token[r],:]
#include "device/cuda/cuda.h"
#include "ops/experts/cuda/experts.h"
#include "ops/experts/d_expert_down_quantised.h"
#include "ops/experts/experts_backends.h"
#include "ops/grouped_gemm/sm90/block_scaled_launch.h"
#include "ops/sm90/tensor_map.h"

namespace moebius::cuda {
namespace {

// y[r,:] = b[e] x[token[r],:], with b [e, N, K] in memory.
struct GatheredProductF8 {
  static constexpr GroupedGemmConfig kConfig = kSm90GatheredRowsF8;
  static constexpr bool kGather = true;
  static constexpr Major kMajorB = Major::k;
  static constexpr int kHalf = kConfig.tile_n / 2, kPieces = kConfig.tile_n / 64;

  struct Params {
    CUtensorMap a, b;
    Gather gather;
    RowTiles tiles;
    int32_t num_k;
    uint16_t* y;
    int32_t N;
    BlockScales scales;
  };

  __device__ static void load_b(const Params& p, const CUtensorMap* map, const SlotLoad& load, uint32_t half, int32_t k,
                                int32_t tile_n, int32_t expert) {
    load.box(map, half * GemmShared<kConfig>::kHalfBytesB, k * kConfig.tile_k,
             tile_n * kConfig.tile_n + static_cast<int32_t>(half) * kHalf, expert);
  }
  __device__ static int32_t source_row(const Params& p, int32_t row) { return __ldg(p.gather.token + row); }
  __device__ static int32_t column_block(const Params&, int32_t n, int half) { return 2 * n + half; }

  __device__ __forceinline__ static void store(const Params& p, const float (&sum)[128], const TileNote& tile,
                                               int32_t row, const WarpMemory& memory) {
    HeldRows held;
    held.take(sum, tile, row);
    for_each_constant<0, kPieces>([&](auto piece) {
      constexpr int kPiece = decltype(piece)::value;
      const int32_t n = tile.n * kConfig.tile_n + kPiece * 64, chunks = (p.N - n) / 8;
      if (chunks <= 0) return;
      store_box<16 * kPiece>({p.y + static_cast<int64_t>(held.row) * p.N + n, 2 * p.N, held.rows, chunks},
                             memory.staging + kPiece % 2 * 2048, held.words);
    });
  }
  __device__ __forceinline__ static void consume(const Params& p, const SlotRing<kConfig>& ring,
                                                 const NoteRing<kConfig>& notes) {
    consume_scaled<GatheredProductF8>(p, ring, notes);
  }
};

}  // namespace

void d_expert_down_product(Stream& s, const DExpertDownQuantised& a) {
  if (a.rows.token_R.empty()) {
    return sm90::rows_product_f8(
        s, {.y_RN = a.g_RF, .a_RK = a.dout_TD, .b_eNK = a.w2_eDF, .offsets_e1 = a.rows.offsets_e1}, "d_expert_down");
  }
  using Op = GatheredProductF8;
  const int64_t N = a.g_RF.dim(1), K = a.dout_TD.data.dim(1);
  Op::Params p{};
  p.a = rows_map(a.dout_TD.data, Op::kConfig);
  p.b = weights_map(a.w2_eDF.data, Op::kConfig, Op::kHalf);
  p.gather = gather_of(a.dout_TD.data, a.rows.token_R);
  p.tiles = row_tiles(a.rows.offsets_e1, a.g_RF.dim(0), div_ceil(N, Op::kConfig.tile_n), Op::kConfig.l2_group);
  p.num_k = static_cast<int32_t>(div_ceil(K, Op::kConfig.tile_k));
  p.y = reinterpret_cast<uint16_t*>(a.g_RF.data);
  p.N = static_cast<int32_t>(N);
  set_scales(p.scales, a.dout_TD, a.w2_eDF);
  launch_grouped<Op>(s, p, "d_expert_down");
}

}  // namespace moebius::cuda
