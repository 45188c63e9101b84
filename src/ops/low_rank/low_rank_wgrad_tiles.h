// How a GPU cuts low_rank_wgrad into the work of thread blocks. It depends on shapes alone, so that the
// bits do, and so that a plan knows the scratch without a GPU.
//
// One side has many columns, the other few. A block has a tile of each, of one matrix, and reads rows
// of both. Where that makes too few blocks to fill a GPU the rows are split into parts, whose sums are
// kept in scratch and added in order.
#pragma once

#include <algorithm>

#include "ops/low_rank/low_rank.h"

namespace moebius {

constexpr int64_t kLowRankWideTile = 128;

struct LowRankWgradTiles {
  explicit LowRankWgradTiles(const LowRankWgrad& a)
      : left_is_wide(a.left.count >= a.right.count),
        wide_columns(std::max(a.left.count, a.right.count)),
        narrow_columns(std::min(a.left.count, a.right.count)),
        matrices(a.dw_ePQ.shape.rank() == 3 ? a.dw_ePQ.dim(0) : 1),
        num_rows(a.gather_left ? a.right_RN.dim(0) : a.left_RM.dim(0)),
        narrow(narrow_columns > 32 ? 64 : 32),
        wide_tiles(div_ceil(wide_columns, kLowRankWideTile)),
        narrow_tiles(div_ceil(narrow_columns, narrow)) {
    const int64_t tiles = std::max(matrices * wide_tiles * narrow_tiles, int64_t{1});
    const int64_t max_parts = num_rows / std::max(matrices, int64_t{1}) / kFewestRows;
    num_parts = std::clamp(kWantedBlocks / tiles, int64_t{1}, std::max(max_parts, int64_t{1}));
  }
  int64_t scratch_bytes() const {
    return num_parts == 1 ? 0 : num_parts * matrices * wide_columns * narrow_columns * size_of(DType::f32);
  }

  bool left_is_wide;
  int64_t wide_columns, narrow_columns, matrices, num_rows;
  int64_t narrow;  // columns of a tile of the narrow side
  int64_t wide_tiles, narrow_tiles, num_parts = 1;

 private:
  // Blocks that fill a GPU, and rows of a part that are worth a block.
  static constexpr int64_t kWantedBlocks = 1024, kFewestRows = 256;
};

}  // namespace moebius
