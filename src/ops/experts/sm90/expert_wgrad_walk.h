// The tiles of expert_wgrad, and the order in which clusters compute them.
#pragma once

#include "ops/grouped_gemm/sm90/tiles.h"
#include "ops/sm90/sm90.h"

namespace moebius::cuda::sm90 {

struct Side {
  const __nv_bfloat16* x;
  const int32_t* index;  // null: row r is row r
  int width;
};
struct Params {
  Side gathered, plain;
  const int32_t* offsets;
  int num_experts, gather_steps, plain_steps;  // clusters along each side
  int max_clusters;                            // of a grid without a limit on its blocks: tiles are cut for these
  bool accumulate;
  float4* first_parts;  // of a bf16 dw: the sums of the first parts of the tiles that are cut
};

enum class TilePart : int { whole, first, second };

// The expert of a tile, and for a dw in bf16 which part of which tile it is, in one number.
struct TileTag {
  static constexpr int kExpertBits = 10, kPartBits = 2;
  int bits;
  __device__ __forceinline__ int expert() const { return bits & ((1 << kExpertBits) - 1); }
  __device__ __forceinline__ TilePart part() const {
    return static_cast<TilePart>(bits >> kExpertBits & ((1 << kPartBits) - 1));
  }
  __device__ __forceinline__ int number() const { return bits >> (kExpertBits + kPartBits); }
  __device__ __forceinline__ void set(TilePart part, int number) {
    bits |= static_cast<int>(part) << kExpertBits | number << (kExpertBits + kPartBits);
  }
};

struct Tile {
  TileTag tag;
  int gather_col, plain_col;
  int begin, end;
  bool adds;  // to what is in dw: without accumulate, the second part of a tile that is cut
};

// The tiles of a cluster that have rows: every num_clusters-th. If all blocks ended their tiles at the same time, they
// would also wait for memory at the same time. So the first tile of each cluster is cut in two at a different row, and
// its second part is computed last. A grid with a limit on its blocks cuts the same tiles at the same rows, so that no
// sum depends on the limit: some of its clusters then have two or more such tiles.
template <class L, bool kTagsParts>
class Walk {
 public:
  __device__ Walk(const Params& p, const typename L::Shared& s) : p_(p), s_(s), rank_(cluster_block_rank()) {
    const int num_tiles = s.num_active * p.gather_steps * p.plain_steps;
    num_own_ = own_below(num_tiles);
    num_cut_ = own_below(min(p.max_clusters, num_tiles - (kTilesToCut - 1) * p.max_clusters));
  }
  __device__ bool next(Tile& tile) {
    do {
      if (step_ >= num_own_ + num_cut_) return false;
      const bool is_second = step_ >= num_own_;
      const int own = is_second ? step_ - num_own_ : step_;
      const int t = static_cast<int>(blockIdx.x / 2 + own * (gridDim.x / 2));
      tile = tile_at(t);
      if (own < num_cut_) {
        const int num_blocks = min((tile.end - tile.begin + L::kDepth - 1) / L::kDepth, kBlocksToSpread);
        const int row = min(tile.begin + num_blocks * t / p_.max_clusters * L::kDepth, tile.end);
        tile.adds = tile.adds || (is_second && row > tile.begin);
        if (kTagsParts && row > tile.begin && row < tile.end)
          tile.tag.set(is_second ? TilePart::second : TilePart::first, t);
        (is_second ? tile.begin : tile.end) = row;
      }
      ++step_;
    } while (tile.begin == tile.end);
    return true;
  }

 private:
  static constexpr int kTilesToCut = 4, kBlocksToSpread = 32;
  // Returns the number of this cluster's tiles among the first n.
  __device__ static int own_below(int n) {
    const int cluster = blockIdx.x / 2, num_clusters = gridDim.x / 2;
    return cluster < n ? (n - cluster + num_clusters - 1) / num_clusters : 0;
  }
  __device__ Tile tile_at(int t) const {
    const int per_expert = p_.gather_steps * p_.plain_steps, expert = s_.order[t / per_expert];
    const GridStep step = grouped_step(t % per_expert, p_.gather_steps, p_.plain_steps, L::kConfig.l2_group);
    return {{expert},
            (2 * step.row + static_cast<int>(rank_)) * L::kGatherCols,
            step.col * L::kPlainCols,
            p_.offsets[expert],
            p_.offsets[expert + 1],
            p_.accumulate};
  }
  const Params& p_;
  const typename L::Shared& s_;
  uint32_t rank_;
  int num_own_, num_cut_, step_ = 0;
};

// order[0, num_active): the experts with rows, most rows first.
template <class L>
__device__ void order_experts(const Params& p, typename L::Shared& s) {
  int num_active = 0;
  for (int e = threadIdx.x; e < p.num_experts; e += L::kThreads) {
    const int rows = p.offsets[e + 1] - p.offsets[e];
    int place = 0;
    for (int other = 0; other < p.num_experts; ++other) {
      const int others = p.offsets[other + 1] - p.offsets[other];
      place += others > rows || (others == rows && other < e);
    }
    s.order[place] = e;
    num_active += rows > 0;
  }
  if (threadIdx.x == 0) s.num_active = 0;
  __syncthreads();
  if (num_active > 0) atomicAdd(&s.num_active, num_active);
}

}  // namespace moebius::cuda::sm90
