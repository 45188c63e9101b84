// The tiles of the low-rank kernels: which rows a block works on, copies of them to shared memory, and
// from there to the registers of a warp. A block has 8 warps.
#pragma once

#include <algorithm>

#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/sm80/elements.h"
#include "ops/sm80/fragments.h"

namespace moebius::cuda::sm80 {

constexpr int kLowRankThreads = 256;

// A window of columns of a matrix of bf16, from its first column on.
struct LowRankWindow {
  uint16_t* data;
  int64_t ld;     // elements from a row to the next
  int32_t count;  // columns
  uint32_t unit;  // bytes that are copied at a time: 16, 4 or 2 (ops/sm80/elements.h)
  __device__ __forceinline__ const uint16_t* chunk(int64_t row, int32_t column) const {
    return data + row * ld + column;
  }
  // Copies a chunk from `from` on, of which `left` columns are in the window; if not valid, it writes zeros.
  __device__ __forceinline__ void copy(uint32_t to, const uint16_t* from, int32_t left, bool valid) const {
    if (unit == 16)
      copy_16(to, from, valid && left > 0);
    else
      copy_elements(to, reinterpret_cast<const char*>(from), valid ? left : 0, unit);
  }
};
// Returns the unit of `count` columns of rows that begin at `data`.
inline uint32_t unit_of_window(const void* data, int64_t ld, int64_t count) {
  return std::min(copy_unit(data, ld), copy_unit(nullptr, count));
}

// The rows that belong to each matrix, as in ops/experts/experts.h.
struct LowRankRows {
  const int32_t* offsets;  // null: all rows belong to the one matrix
  int32_t num_matrices, num_rows;
};

// Rows [begin, end) of one matrix; matrix < 0: there are none.
struct RowRange {
  int32_t matrix = -1, begin = 0, end = 0;
};

// Returns the tile of kRows rows with this index, if the tiles of each matrix begin at its first row. A whole
// warp calls it.
template <int kRows>
__device__ __forceinline__ RowRange find_tile(const LowRankRows& rows, int32_t index) {
  if (rows.offsets == nullptr) {
    const int32_t begin = index * kRows;
    if (begin >= rows.num_rows) return {};
    return {0, begin, min(begin + kRows, rows.num_rows)};
  }
  const int32_t lane = static_cast<int32_t>(threadIdx.x % 32);
  for (int32_t first = 0; first < rows.num_matrices; first += 32) {
    const bool there = first + lane < rows.num_matrices;
    const int32_t begin = there ? __ldg(rows.offsets + first + lane) : 0;
    const int32_t end = there ? __ldg(rows.offsets + first + lane + 1) : 0;
    const int32_t tiles = (end - begin + kRows - 1) / kRows;
    int32_t before = tiles;  // with this lane's own
    for (int32_t d = 1; d < 32; d *= 2) {
      const int32_t other = __shfl_up_sync(0xffffffffu, before, d);
      if (lane >= d) before += other;
    }
    const uint32_t found = __ballot_sync(0xffffffffu, index < before);
    if (found != 0) {
      const int at = __ffs(static_cast<int>(found)) - 1;
      const int32_t tile = index - __shfl_sync(0xffffffffu, before - tiles, at);
      const int32_t row = __shfl_sync(0xffffffffu, begin, at) + tile * kRows;
      return {first + at, row, min(row + kRows, __shfl_sync(0xffffffffu, end, at))};
    }
    index -= __shfl_sync(0xffffffffu, before, 31);
  }
  return {};
}

// Copies a tile of kRows rows with kChunks chunks of 8 elements. The chunk of row i is at
// window.chunk(first_row + i, column + ...), and zeros where the row is not below end_row or the
// columns not below end_column.
template <int kRows, int kChunks>
__device__ __forceinline__ void copy_tile(uint32_t to, const LowRankWindow& from, int64_t first_row, int64_t end_row,
                                          int32_t column, int32_t end_column) {
  static_assert(kRows * kChunks % kLowRankThreads == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / kLowRankThreads; ++i) {
    const uint32_t at = threadIdx.x + i * kLowRankThreads, row = at / kChunks, chunk = at % kChunks;
    const int32_t c = column + static_cast<int32_t>(8 * chunk);
    const bool valid = first_row + row < end_row && c < end_column;
    from.copy(to + swizzled<kChunks>(row, chunk), from.chunk(valid ? first_row + row : 0, valid ? c : 0),
              end_column - c, valid);
  }
}

inline bool takes_window(const Tensor& t, const Columns& columns) {
  return t.dtype == DType::bf16 && columns.count > 0 && t.dim(0) < INT32_MAX / 2 && t.dim(1) < INT32_MAX;
}
inline LowRankWindow window_of(const Tensor& t, const Columns& columns) {
  uint16_t* data = static_cast<uint16_t*>(t.data) + columns.first;
  const int64_t ld = t.dim(1);
  return {data, ld, static_cast<int32_t>(columns.count), unit_of_window(data, ld, columns.count)};
}
inline const int32_t* index_of(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

// The sizes of one matrix, or of one of each expert.
struct Matrices {
  explicit Matrices(const Tensor& w)
      : num(w.shape.rank() == 3 ? w.dim(0) : 1), rows(w.dim(w.shape.rank() - 2)), cols(w.dim(w.shape.rank() - 1)) {}
  int64_t num, rows, cols;
};

}  // namespace moebius::cuda::sm80
