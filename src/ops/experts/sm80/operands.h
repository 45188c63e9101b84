// The operands of the expert ops as the portable kernels read them.
#pragma once

#include "ops/experts/cuda/experts.h"
#include "ops/experts/experts_desc.h"
#include "ops/grouped_gemm/sm80/launch.h"
#include "ops/grouped_gemm/sm80/warp_rows.h"

namespace moebius::cuda::sm80 {

inline Source source_of(const Tensor& rows, const int32_t* index) {
  return {static_cast<const char*>(rows.data), index, width_of(rows)};
}

// The weights of all experts, [e, rows, columns].
struct Weights {
  const char* data;
  int64_t expert_bytes;
  int32_t rows;
  RowWidth width;
  __device__ __forceinline__ const char* of(int32_t expert) const { return data + expert * expert_bytes; }
};
inline Weights weights_of(const Tensor& w) {
  return {static_cast<const char*>(w.data), w.dim(1) * w.dim(2) * 2, static_cast<int32_t>(w.dim(1)), width_of(w)};
}

inline ColumnBias column_bias(const Tensor& b_eC, int64_t first) {
  if (b_eC.empty()) return {};
  return {halves(b_eC), static_cast<int32_t>(first), static_cast<int32_t>(b_eC.dim(1))};
}

// Opens the rows of A in a tile: those of the tile's expert, gathered if there is an index. The last of them is read
// again in place of rows past it.
template <class CopyA>
__device__ __forceinline__ void open_rows(CopyA& a, const Source& x, const Tile& tile) {
  const auto row_of = [&](int32_t i) { return row_in_source(x.index, min(tile.m + i, tile.end_m - 1), true); };
  a.open(x.rows, x.width, {static_cast<int32_t>(CopyA::first_row()), row_of});
}

}  // namespace moebius::cuda::sm80
