// The division of the products of all experts into output tiles, and the order in which blocks compute them. The number
// of tiles depends on the offsets in device memory. The grid is fixed: block b computes every tile whose number is b
// modulo the number of blocks.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor.h"

namespace moebius::cuda::sm80 {

// The dimension that the offsets cut.
enum class Cut : int { m, k };

struct Tiles {
  const int32_t* offsets;  // [num_experts + 1]; null: one expert has [0, cut)
  int32_t num_experts, cut;
  int32_t m, k;           // only the one that is not cut is read
  int32_t across;         // tiles across the columns of the output
  bool has_idle = false;  // with Cut::k, experts without rows have tiles too, whose sums are zero
};

inline Tiles make_tiles(const Tensor& offsets_e1, int64_t cut, int64_t m, int64_t k, int64_t across) {
  const bool all = offsets_e1.empty();
  return {.offsets = all ? nullptr : offsets_e1.ptr<int32_t>(),
          .num_experts = all ? 1 : static_cast<int32_t>(offsets_e1.dim(0) - 1),
          .cut = static_cast<int32_t>(cut),
          .m = static_cast<int32_t>(m),
          .k = static_cast<int32_t>(k),
          .across = static_cast<int32_t>(across)};
}

// The offsets in shared memory. All threads of the block call it, and it ends with a barrier.
__device__ __forceinline__ void copy_offsets(int32_t* to, const Tiles& tiles) {
  for (int32_t e = threadIdx.x; e <= tiles.num_experts; e += blockDim.x)
    to[e] = tiles.offsets ? __ldg(tiles.offsets + e) : e * tiles.cut;
  __syncthreads();
}

struct Tile {
  int32_t expert;
  int32_t m, end_m;  // the first row of A, and where the rows of its expert end
  int32_t n;         // tile across
  int32_t k, end_k;  // the range that is summed over
};

// The tiles of a block, in order. Groups of kGroup tiles down the rows are computed column after column,
// so that L2 keeps the rows while the weights stream by.
template <Cut kCut, int kTileM, int kGroup>
class TileWalk {
 public:
  __device__ __forceinline__ TileWalk(const Tiles& tiles, const int32_t* offsets)
      : tiles_(tiles), offsets_(offsets), unit_(static_cast<int32_t>(blockIdx.x)) {
    end_ = offsets_[0];
    open_expert();
  }

  __device__ __forceinline__ bool next(Tile& tile) {
    while (unit_ >= units_) {
      if (++expert_ >= tiles_.num_experts) return false;
      unit_ -= units_;
      open_expert();
    }
    const int32_t first = unit_ / (kGroup * tiles_.across) * kGroup, in_group = unit_ - first * tiles_.across;
    const int32_t size = min(kGroup, down_ - first);
    unit_ += static_cast<int32_t>(gridDim.x);
    tile.n = in_group / size;
    const int32_t m = (first + in_group - tile.n * size) * kTileM;
    tile.expert = expert_;
    if constexpr (kCut == Cut::m) {
      tile.m = begin_ + m, tile.end_m = end_;
      tile.k = 0, tile.end_k = tiles_.k;
    } else {
      tile.m = m, tile.end_m = tiles_.m;
      tile.k = begin_, tile.end_k = end_;
    }
    return true;
  }

 private:
  __device__ __forceinline__ void open_expert() {
    begin_ = end_;
    end_ = offsets_[expert_ + 1];
    const bool is_idle = begin_ == end_ && !tiles_.has_idle;
    const int32_t rows = kCut == Cut::m || is_idle ? end_ - begin_ : tiles_.m;
    down_ = (rows + kTileM - 1) / kTileM;
    units_ = down_ * tiles_.across;
  }

  const Tiles& tiles_;
  const int32_t* offsets_;
  int32_t unit_, expert_ = 0;  // unit_ counts from the first of expert_
  int32_t begin_ = 0, end_ = 0, down_ = 0, units_ = 0;
};

}  // namespace moebius::cuda::sm80
