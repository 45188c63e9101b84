// expert_wgrad with mma.sync: left^T right of the rows of each expert, added to dw in memory. Both sides
// have rows across k, and either may be gathered. One block computes all rows of its elements of dw, so
// that each is added to once, in the order of the rows.
#include "ops/experts/sm80/operands.h"
#include "ops/grouped_gemm/sm80/warp_rows.h"

namespace moebius::cuda::sm80 {
namespace {

template <PortableGemmConfig kOpConfig>
struct WgradGemm {
  static constexpr PortableGemmConfig kConfig = kOpConfig;
  static constexpr Cut kCut = Cut::k;
  static constexpr Major kMajorA = Major::mn, kMajorB = Major::mn;
  using CopyA = RowsAcrossK<kConfig.tile_m, kConfig.tile_k, kConfig.threads(), true>;
  using CopyB = RowsAcrossK<kConfig.tile_n, kConfig.tile_k, kConfig.threads(), true>;

  struct Params {
    Tiles tiles;
    Source left, right;
    float* dw;
    int32_t N;
  };

  __device__ __forceinline__ static void open(const Params& p, CopyA& a, CopyB& b, const Tile& tile) {
    a.open(p.left.rows, p.left.index, p.left.chunks, static_cast<uint32_t>(tile.m / 8), tile.k, tile.end_k);
    b.open(p.right.rows, p.right.index, p.right.chunks, static_cast<uint32_t>(tile.n * (kConfig.tile_n / 8)), tile.k,
           tile.end_k);
  }

  __device__ __forceinline__ static void begin(const Params&, const Tile&, WarpSums& sums) { clear_sums(sums); }

  static constexpr int kRows = 8, kPairs = 8;  // of a lane: rows, and pairs of columns in each
  using LanePairs = float2[kPairs];

  // Row i of the lane in dw, from its first pair on.
  __device__ __forceinline__ static void load(LanePairs& to, const float* row, bool there, int32_t columns) {
#pragma unroll
    for (int j = 0; j < kPairs; ++j)
      to[j] = there && 8 * j < columns ? *reinterpret_cast<const float2*>(row + 8 * j) : float2{};
  }

  __device__ __forceinline__ static void store(const Params& p, const Tile& tile, const WarpSums& sums) {
    const int32_t first = tile.m + WarpPlace<kConfig>::row() + static_cast<int32_t>(threadIdx.x % 32 / 4);
    const int32_t col =
        tile.n * kConfig.tile_n + WarpPlace<kConfig>::col() + static_cast<int32_t>(threadIdx.x % 4) * 2;
    const int32_t columns = p.N - col;
    float* dw = p.dw + (int64_t{tile.expert} * p.tiles.m + first) * p.N + col;
    LanePairs next;
    load(next, dw, first < tile.end_m, columns);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      LanePairs here;
#pragma unroll
      for (int j = 0; j < kPairs; ++j) here[j] = next[j];
      float* row = dw + int64_t{8 * i} * p.N;
      if (i + 1 < kRows) load(next, row + int64_t{8} * p.N, first + 8 * (i + 1) < tile.end_m, columns);
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float* sum = &sums[i / 2][j][i % 2 * 2];
        if (first + 8 * i < tile.end_m && 8 * j < columns)
          *reinterpret_cast<float2*>(row + 8 * j) = {here[j].x + sum[0], here[j].y + sum[1]};
      }
    }
  }
};

template <PortableGemmConfig kConfig>
void launch(Stream& s, const ExpertWgrad& a) {
  using Op = WgradGemm<kConfig>;
  const int64_t E = a.dw_eMN.dim(0), M = a.dw_eMN.dim(1), N = a.dw_eMN.dim(2);
  const int32_t* index = index_of(a.rows);
  typename Op::Params p{.tiles = make_tiles(a.rows.offsets_e1, 0, M, 0, div_ceil(N, kConfig.tile_n)),
                        .left = source_of(a.left_RM.data, a.gather_left ? index : nullptr),
                        .right = source_of(a.right_RN.data, a.gather_right ? index : nullptr),
                        .dw = a.dw_eMN.ptr<float>(),
                        .N = static_cast<int32_t>(N)};
  MOEBIUS_ASSERT(p.tiles.num_experts == E);
  launch_portable<Op>(s, p, "expert_wgrad");
}

}  // namespace

bool takes(const ExpertWgrad& a) {
  return takes_matrix(a.left_RM.data) && takes_matrix(a.right_RN.data) && a.dw_eMN.dim(0) <= kMaxPortableExperts &&
         reinterpret_cast<uintptr_t>(a.dw_eMN.data) % 16 == 0;
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  with_portable_config(s, describe(a), [&]<PortableGemmConfig kConfig>() { launch<kConfig>(s, a); });
}

}  // namespace moebius::cuda::sm80
