// The division of the rows of all experts into output tiles, and the order in which clusters of two blocks compute
// them. The number of tiles depends on the offsets in device memory. The grid is fixed, and cluster c computes every
// unit whose number is c modulo the number of clusters.
//
// A unit is two tiles, one per block: row tiles m and m + 1 of the same expert at the same columns,
// so that the blocks share their piece of the weights. An odd last row tile of an expert is
// computed at columns n and n + 1 instead, where nothing is shared.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor.h"

namespace moebius::cuda {

struct RowTiles {
  const int32_t* offsets;  // [num_experts + 1]; null: one expert has rows [0, num_rows)
  int32_t num_experts, num_rows;
  int32_t across;  // tiles across the columns of the output
  int32_t group;   // units whose rows are kept in L2 while the weights stream by

  __device__ int32_t offset(int32_t expert) const { return offsets ? __ldg(offsets + expert) : expert * num_rows; }
};

// Without offsets one expert has all rows. With groups of 8 units 16 row tiles by about 8 across
// are in flight.
inline RowTiles row_tiles(const Tensor& offsets_e1, int64_t num_rows, int64_t across, int l2_group) {
  const bool all = offsets_e1.empty();
  return {.offsets = all ? nullptr : offsets_e1.ptr<int32_t>(),
          .num_experts = all ? 1 : static_cast<int32_t>(offsets_e1.dim(0) - 1),
          .num_rows = static_cast<int32_t>(num_rows),
          .across = static_cast<int32_t>(across),
          .group = l2_group};
}

struct RowTile {
  int32_t expert, first_row, end_row;  // end_row: of the expert; rows of the tile at and past it are not there
  int32_t n;                           // tile across; >= RowTiles::across: nothing to store
  bool shared;                         // both blocks of the cluster have this n
};

// The tiles of a block, in order, of kTileM rows each.
template <int kTileM>
class RowTileWalk {
 public:
  __device__ RowTileWalk(const RowTiles& tiles, uint32_t block_in_cluster)
      : tiles_(tiles), block_(static_cast<int32_t>(block_in_cluster)), unit_(static_cast<int32_t>(blockIdx.x / 2)) {
    end_ = tiles_.offset(0);
    open_expert();
  }

  __device__ bool next(RowTile& tile) {
    while (unit_ >= base_ + units_) {
      if (++expert_ >= tiles_.num_experts) return false;
      base_ += units_;
      open_expert();
    }
    const int32_t u = unit_ - base_, pairs = down_ / 2, across = tiles_.across;
    unit_ += static_cast<int32_t>(gridDim.x / 2);
    int32_t m;
    tile.shared = u < pairs * across;
    if (tile.shared) {
      const int32_t first = u / (tiles_.group * across) * tiles_.group, in_group = u - first * across;
      const int32_t size = min(tiles_.group, pairs - first);
      tile.n = in_group / size;
      m = 2 * (first + in_group - tile.n * size) + block_;
    } else {
      m = down_ - 1;
      tile.n = 2 * (u - pairs * across) + block_;
    }
    tile.expert = expert_;
    tile.first_row = begin_ + m * kTileM;
    tile.end_row = end_;
    return true;
  }

 private:
  __device__ void open_expert() {
    begin_ = end_;
    end_ = tiles_.offset(expert_ + 1);
    down_ = (end_ - begin_ + kTileM - 1) / kTileM;
    units_ = down_ / 2 * tiles_.across + down_ % 2 * ((tiles_.across + 1) / 2);
  }

  RowTiles tiles_;
  int32_t block_, unit_, expert_ = 0, base_ = 0;
  int32_t begin_ = 0, end_ = 0, down_ = 0, units_ = 0;  // rows and units of expert_
};

}  // namespace moebius::cuda
