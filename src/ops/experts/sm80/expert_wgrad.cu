// expert_wgrad with mma.sync: left^T right over the rows of each expert, stored to dw or added to it. k is not
// contiguous in either side, and one side may be gathered. One block sums over all rows for its elements of dw, so that
// each is written once, with a sum in the order of the rows.
#include "ops/experts/sm80/operands.h"
#include "ops/grouped_gemm/sm80/warp_rows.h"

namespace moebius::cuda::sm80 {
namespace {

// kLeftIndexed, kRightIndexed: whether the side may have an index.
template <bool kLeftIndexed, bool kRightIndexed, PortableGemmConfig kOpConfig, bool kOpInChunks>
struct WgradGemm {
  static constexpr PortableGemmConfig kConfig = kOpConfig;
  static constexpr bool kInChunks = kOpInChunks;
  static constexpr Cut kCut = Cut::k;
  static constexpr Major kMajorA = Major::mn, kMajorB = Major::mn;
  using CopyA = RowsAcrossK<kConfig.tile_m, kConfig.tile_k, kConfig.threads(), kLeftIndexed, kInChunks>;
  using CopyB = RowsAcrossK<kConfig.tile_n, kConfig.tile_k, kConfig.threads(), kRightIndexed, kInChunks>;

  struct Params {
    Tiles tiles;
    Source left, right;
    float* dw;
    int32_t N;
    bool accumulate;
  };

  __device__ __forceinline__ static Units units(const Params& p) { return {p.left.width.unit, p.right.width.unit}; }
  __device__ __forceinline__ static void open(const Params& p, CopyA& a, CopyB& b, const Tile& tile) {
    a.open(p.left.rows, p.left.index, p.left.width, static_cast<uint32_t>(tile.m / 8), tile.k, tile.end_k);
    b.open(p.right.rows, p.right.index, p.right.width, static_cast<uint32_t>(tile.n * (kConfig.tile_n / 8)), tile.k,
           tile.end_k);
  }

  // The elements of dw that a lane adds to: kRows rows 8 apart, and kPairs pairs of columns in each.
  static constexpr int kRows = 8, kPairs = 8;
  struct LaneElements {
    float* first;
    int32_t rows, columns, N;  // the number of rows and columns, from the tile's first one, that are in dw
    __device__ __forceinline__ LaneElements(const Params& p, const Tile& tile) : N(p.N) {
      const int32_t row = tile.m + WarpPlace<kConfig>::row() + static_cast<int32_t>(threadIdx.x % 32 / 4);
      const int32_t col =
          tile.n * kConfig.tile_n + WarpPlace<kConfig>::col() + static_cast<int32_t>(threadIdx.x % 4) * 2;
      first = p.dw + (int64_t{tile.expert} * p.tiles.m + row) * N + col;
      rows = tile.end_m - row;
      columns = N - col;
    }
    __device__ __forceinline__ float* row(int i) const { return first + int64_t{8 * i} * N; }
    __device__ __forceinline__ bool has(int i, int j) const { return 8 * i < rows && 8 * j < columns; }
  };

  // Prefetches the elements of dw into L2 during the product of the tile. Of the lanes whose elements share 128 bytes,
  // the first prefetches all of them.
  __device__ __forceinline__ static void begin(const Params& p, const Tile& tile, WarpSums& sums) {
    clear_sums(sums);
    if (!p.accumulate) return;
    const LaneElements dw(p, tile);
    const int pair = static_cast<int>(threadIdx.x % 4) * 2;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      if (pair < kPairs && dw.has(i, pair)) asm volatile("prefetch.global.L2 [%0];" ::"l"(dw.row(i) + 8 * pair));
    }
  }

  __device__ __forceinline__ static void store(const Params& p, const Tile& tile, const WarpSums& sums) {
    const LaneElements dw(p, tile);
    if constexpr (!kInChunks) return p.accumulate ? put_elements<true>(dw, sums) : put_elements<false>(dw, sums);
    const bool whole = dw.has(kRows - 1, kPairs - 1);
    if (p.accumulate)
      whole ? put<true, true>(dw, sums) : put<true, false>(dw, sums);
    else
      whole ? put<false, true>(dw, sums) : put<false, false>(dw, sums);
  }

  // kAdds: adds to dw, else stores. kWhole: all elements are in dw, which has rows and columns in multiples
  // of 8. All loads of a row are issued before the first sum waits for one.
  template <bool kAdds, bool kWhole>
  __device__ __forceinline__ static void put(const LaneElements& dw, const WarpSums& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float2* row = reinterpret_cast<float2*>(dw.row(i));
      float2 x[kPairs];
#pragma unroll
      for (int j = 0; j < kPairs; ++j) x[j] = kAdds && (kWhole || dw.has(i, j)) ? __ldcg(row + 4 * j) : float2{};
#pragma unroll
      for (int j = 0; j < kPairs; ++j) {
        const float* sum = &sums[i / 2][j][i % 2 * 2];
        if (kWhole || dw.has(i, j)) __stcg(row + 4 * j, {x[j].x + sum[0], x[j].y + sum[1]});
      }
    }
  }
  // The same for any width, where a pair may begin at any element, and its second one may be past the last column.
  template <bool kAdds>
  __device__ __forceinline__ static void put_elements(const LaneElements& dw, const WarpSums& sums) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      float* row = dw.row(i);
      const auto column = [](int j) { return j / 2 * 8 + j % 2; };
      const auto has = [&](int j) { return 8 * i < dw.rows && column(j) < dw.columns; };
      float x[2 * kPairs];
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) x[j] = kAdds && has(j) ? __ldcg(row + column(j)) : 0.0f;
#pragma unroll
      for (int j = 0; j < 2 * kPairs; ++j) {
        if (has(j)) __stcg(row + column(j), x[j] + sums[i / 2][j / 2][i % 2 * 2 + j % 2]);
      }
    }
  }
};

template <bool kLeftIndexed, bool kRightIndexed, PortableGemmConfig kConfig, bool kInChunks>
void launch(Stream& s, const ExpertWgrad& a) {
  using Op = WgradGemm<kLeftIndexed, kRightIndexed, kConfig, kInChunks>;
  const int64_t E = a.dw_eMN.dim(0), M = a.dw_eMN.dim(1), N = a.dw_eMN.dim(2);
  const int32_t* index = index_of(a.rows);
  typename Op::Params p{.tiles = make_tiles(a.rows.offsets_e1, 0, M, 0, div_ceil(N, kConfig.tile_n)),
                        .left = source_of(a.left_RM.data, a.gather_left ? index : nullptr),
                        .right = source_of(a.right_RN.data, a.gather_right ? index : nullptr),
                        .dw = a.dw_eMN.ptr<float>(),
                        .N = static_cast<int32_t>(N),
                        .accumulate = a.accumulate};
  p.tiles.has_idle = !a.accumulate;
  MOEBIUS_ASSERT(p.tiles.num_experts == E);
  launch_portable<Op>(s, p, "expert_wgrad");
}

}  // namespace

bool takes(const ExpertWgrad& a) {
  const bool one_side = !(a.gather_left && a.gather_right) || a.rows.token_R.empty();
  return one_side && takes_matrix(a.left_RM.data) && takes_matrix(a.right_RN.data) &&
         a.dw_eMN.dim(0) <= kMaxPortableExperts && reinterpret_cast<uintptr_t>(a.dw_eMN.data) % 16 == 0;
}

void expert_wgrad(Stream& s, const ExpertWgrad& a) {
  const bool in_chunks = are_in_chunks(a.left_RM.data, a.right_RN.data);
  with_portable_config(s, describe(a), in_chunks, [&]<PortableGemmConfig kConfig, bool kInChunks>() {
    if constexpr (!kInChunks)
      launch<true, true, kConfig, false>(s, a);
    else
      a.gather_left ? launch<true, false, kConfig, true>(s, a) : launch<false, true, kConfig, true>(s, a);
  });
}

}  // namespace moebius::cuda::sm80
