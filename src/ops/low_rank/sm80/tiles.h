// The tiles of the low-rank kernels: which rows a block works on, copies of them to shared memory, and
// from there to the registers of a warp. A block has 8 warps.
#pragma once

#include "ops/cuda/vector.h"
#include "ops/low_rank/low_rank.h"
#include "ops/sm80/fragments.h"

namespace moebius::cuda::sm80 {

constexpr int kLowRankThreads = 256;

// A window of columns of a matrix of bf16, from its first column on.
struct LowRankWindow {
  uint16_t* data;
  int64_t ld;     // elements from a row to the next
  int32_t count;  // columns
  __device__ __forceinline__ const void* chunk(int64_t row, int32_t column) const { return data + row * ld + column; }
};

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
    copy_16(to + swizzled<kChunks>(row, chunk), from.chunk(valid ? first_row + row : 0, valid ? c : 0), valid);
  }
}

inline bool takes_window(const Tensor& t, const Columns& columns) {
  return t.dtype == DType::bf16 && t.dim(1) % 8 == 0 && columns.first % 8 == 0 && columns.count % 8 == 0 &&
         reinterpret_cast<uintptr_t>(t.data) % 16 == 0 && t.dim(0) < INT32_MAX / 2 && t.dim(1) < INT32_MAX;
}
inline LowRankWindow window_of(const Tensor& t, const Columns& columns) {
  return {static_cast<uint16_t*>(t.data) + columns.first, t.dim(1), static_cast<int32_t>(columns.count)};
}
inline const int32_t* index_of(const Tensor& t) { return t.empty() ? nullptr : t.ptr<int32_t>(); }

// The sizes of one matrix, or of one of each expert.
struct Matrices {
  explicit Matrices(const Tensor& w)
      : num(w.shape.rank() == 3 ? w.dim(0) : 1), rows(w.dim(w.shape.rank() - 2)), cols(w.dim(w.shape.rank() - 1)) {}
  int64_t num, rows, cols;
};

}  // namespace moebius::cuda::sm80
