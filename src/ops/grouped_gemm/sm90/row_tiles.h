// The division of the rows of all experts into output tiles, and the order in which clusters of two blocks compute
// them. Rows are in runs: one of each expert with all of its rows, or as many of each as the caller chooses. The number
// of tiles depends on the runs in device memory. The grid is fixed, and cluster c computes every
// unit whose number is c modulo the number of clusters.
//
// A unit is two tiles, one per block: row tiles m and m + 1 of the same run at the same columns,
// so that the blocks share their piece of the weights. An odd last row tile of a run is
// computed at columns n and n + 1 instead, where nothing is shared.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "core/tensor.h"

namespace moebius::cuda {

struct RowTiles {
  const int32_t *begins, *ends;  // [num_runs]; null: one run has rows [0, num_rows)
  int32_t num_runs, runs_of_expert, num_rows;
  int32_t across;  // tiles across the columns of the output
  int32_t group;   // units whose rows are kept in L2 while the weights stream by

  __device__ int32_t begin(int32_t run) const { return begins ? __ldg(begins + run) : 0; }
  __device__ int32_t end(int32_t run) const { return begins ? __ldg(ends + run) : num_rows; }
};

// Without offsets one expert has all rows. runs: i32 [2, G], begins and ends, as many of each expert; empty: all rows.
// With groups of 8 units 16 row tiles by about 8 across are in flight.
inline RowTiles row_tiles(const Tensor& offsets_e1, int64_t num_rows, int64_t across, int l2_group,
                          const Tensor& runs_2G = {}) {
  const bool all = offsets_e1.empty(), some = !runs_2G.empty();
  const int32_t* begins = all ? nullptr : some ? runs_2G.ptr<int32_t>() : offsets_e1.ptr<int32_t>();
  const auto num_experts = all ? 1 : static_cast<int32_t>(offsets_e1.dim(0) - 1);
  const auto num_runs = some ? static_cast<int32_t>(runs_2G.dim(1)) : num_experts;
  return {.begins = begins,
          .ends = all ? nullptr : begins + (some ? num_runs : 1),
          .num_runs = num_runs,
          .runs_of_expert = num_runs / num_experts,
          .num_rows = static_cast<int32_t>(num_rows),
          .across = static_cast<int32_t>(across),
          .group = l2_group};
}

struct RowTile {
  int32_t expert, first_row, end_row;  // end_row: of the run; rows of the tile at and past it are not there
  int32_t n;                           // tile across; >= RowTiles::across: nothing to store
  bool shared;                         // both blocks of the cluster have this n
};

// The tiles of a block, in order, of kTileM rows each.
template <int kTileM>
class RowTileWalk {
 public:
  __device__ RowTileWalk(const RowTiles& tiles, uint32_t block_in_cluster)
      : tiles_(tiles), block_(static_cast<int32_t>(block_in_cluster)), unit_(static_cast<int32_t>(blockIdx.x / 2)) {
    open_run();
  }

  __device__ bool next(RowTile& tile) {
    while (unit_ >= base_ + units_) {
      if (++run_ >= tiles_.num_runs) return false;
      base_ += units_;
      open_run();
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
    tile.expert = run_ / tiles_.runs_of_expert;
    tile.first_row = begin_ + m * kTileM;
    tile.end_row = end_;
    return true;
  }

 private:
  __device__ void open_run() {
    begin_ = tiles_.begin(run_);
    end_ = tiles_.end(run_);
    down_ = (end_ - begin_ + kTileM - 1) / kTileM;
    units_ = down_ / 2 * tiles_.across + down_ % 2 * ((tiles_.across + 1) / 2);
  }

  RowTiles tiles_;
  int32_t block_, unit_, run_ = 0, base_ = 0;
  int32_t begin_ = 0, end_ = 0, down_ = 0, units_ = 0;  // rows and units of run_
};

}  // namespace moebius::cuda
