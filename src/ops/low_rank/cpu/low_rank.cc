// Both products are computed in tiles of rows, each by widened_gemm into f32 sums. The number of a tile's rows depends
// on its expert, and dnnl_gemm would cache a primitive for each such shape.
#include "ops/low_rank/low_rank.h"

#include <algorithm>
#include <cstring>

#include "ops/cpu/vector.h"
#include "ops/gemm/cpu/widened_gemm.h"
#include "ops/low_rank/low_rank_backends.h"

namespace moebius {
namespace cpu {
namespace {

constexpr int64_t kTileRows = 64;  // of one expert
constexpr int64_t kTileCols = 512;
constexpr int64_t kChunk = 256;  // rows of an expert that a weight gradient reads at once

const int32_t* tokens_of(const Rows& rows) { return rows.token_R.empty() ? nullptr : rows.token_R.ptr<int32_t>(); }

// Rows [begin, end) of one expert.
struct Range {
  int64_t expert = 0, begin = 0, end = 0;
};

// The rows of each expert; without offsets one expert has all of them.
struct Groups {
  Groups(const Rows& rows, int64_t num_rows)
      : offsets(rows.offsets_e1.empty() ? nullptr : rows.offsets_e1.ptr<int32_t>()),
        count(offsets ? rows.offsets_e1.numel() - 1 : 1),
        num_rows(num_rows) {}
  Range of(int64_t e) const { return offsets ? Range{e, offsets[e], offsets[e + 1]} : Range{0, 0, num_rows}; }
  int64_t num_tiles() const {
    int64_t n = 0;
    for (int64_t e = 0; e < count; ++e) n += div_ceil(of(e).end - of(e).begin, kTileRows);
    return n;
  }
  Range tile(int64_t index) const {
    for (int64_t e = 0;; ++e) {
      const Range all = of(e);
      const int64_t tiles = div_ceil(all.end - all.begin, kTileRows), begin = all.begin + index * kTileRows;
      if (index < tiles) return {e, begin, std::min(begin + kTileRows, all.end)};
      index -= tiles;
    }
  }
  const int32_t* offsets;
  int64_t count, num_rows;
};

// Returns the rows r of a window of x: in place, or gathered into `space`.
template <class T>
Matrix window_of(const Tensor& x, const Columns& columns, const int32_t* token, const Range& rows, void* space) {
  const int64_t ld = x.dim(1);
  const T* from = x.ptr<T>() + columns.first;
  if (!token) return {.data = const_cast<T*>(from + rows.begin * ld), .ld = ld, .dtype = dtype_of<T>};
  T* to = static_cast<T*>(space);
  for (int64_t r = rows.begin; r < rows.end; ++r, to += columns.count)
    std::memcpy(to, from + token[r] * ld, static_cast<size_t>(columns.count) * sizeof(T));
  return {.data = space, .ld = columns.count, .dtype = dtype_of<T>};
}

int64_t matrix_numel(const Tensor& w) { return w.dim(w.shape.rank() - 2) * w.dim(w.shape.rank() - 1); }

// Columns [col, col + n) of the factor [k, N] of an expert.
template <class T>
Matrix factor_of(const LowRankProduct& a, int64_t expert, int64_t col) {
  const int64_t ld = a.w_ePQ.dim(a.w_ePQ.shape.rank() - 1);
  T* w = a.w_ePQ.ptr<T>() + expert * matrix_numel(a.w_ePQ) + a.w_first * ld;
  if (a.transposed) return {.data = w + col, .ld = ld, .dtype = dtype_of<T>};
  return {.data = w + col * ld, .ld = ld, .dtype = dtype_of<T>, .transposed = true};
}

template <class T>
void product_tile(const LowRankProduct& a, const Range& rows, int64_t col, char* space) {
  const int64_t m = rows.end - rows.begin, n = std::min(kTileCols, a.y.count - col), ld = a.y_RM.dim(1);
  auto* sums = reinterpret_cast<float*>(space);
  widened_gemm({.c = {.data = sums, .ld = n},
                .a = window_of<T>(a.x_TK, a.x, tokens_of(a.rows), rows, sums + kTileRows * kTileCols),
                .b = factor_of<T>(a, rows.expert, col),
                .m = m,
                .n = n,
                .k = a.x.count});
  T* y = a.y_RM.ptr<T>() + rows.begin * ld + a.y.first + col;
  for (int64_t i = 0; i < m; ++i, y += ld, sums += n) {
    for (int64_t j = 0; j < n; ++j)
      y[j] = from_f32<T>(a.accumulate ? to_f32(y[j]) + a.scale * sums[j] : a.scale * sums[j]);
  }
}

int64_t space_of(const LowRankProduct& a) {
  const int64_t gathered = a.rows.token_R.empty() ? 0 : kTileRows * a.x.count * size_of(a.x_TK.dtype);
  return kTileRows * kTileCols * 4 + div_ceil(gathered, 64) * 64;
}

constexpr int64_t kWgradSpace = (kTileRows * kTileCols + kChunk * (kTileRows + kTileCols)) * 4;

// Computes dw += scale * the sum over the rows of one expert, chunk after chunk, for a tile of dw.
template <class T>
void wgrad_tile(const LowRankWgrad& a, const Range& rows, int64_t row, int64_t col, char* space) {
  const int64_t m = std::min(kTileRows, a.left.count - row), n = std::min(kTileCols, a.right.count - col);
  auto* sums = reinterpret_cast<float*>(space);
  float *left_space = sums + kTileRows * kTileCols, *right_space = left_space + kChunk * kTileRows;
  const int32_t* token = tokens_of(a.rows);
  std::fill(sums, sums + m * n, 0.0f);
  for (int64_t begin = rows.begin; begin < rows.end; begin += kChunk) {
    const Range chunk{rows.expert, begin, std::min(begin + kChunk, rows.end)};
    Matrix left = window_of<T>(a.left_RM, {a.left.first + row, m}, a.gather_left ? token : nullptr, chunk, left_space);
    left.transposed = true;
    widened_gemm(
        {.c = {.data = sums, .ld = n},
         .a = left,
         .b = window_of<T>(a.right_RN, {a.right.first + col, n}, a.gather_right ? token : nullptr, chunk, right_space),
         .m = m,
         .n = n,
         .k = chunk.end - chunk.begin,
         .accumulate = true});
  }
  float* dw = a.dw_ePQ.ptr<float>() + rows.expert * matrix_numel(a.dw_ePQ) + (a.w_first + row) * a.right.count + col;
  for (int64_t i = 0; i < m; ++i, dw += a.right.count, sums += n) {
    for (int64_t j = 0; j < n; ++j) dw[j] += a.scale * sums[j];
  }
}

}  // namespace

void low_rank_product(Stream& s, const LowRankProduct& a) {
  const Groups groups(a.rows, a.y_RM.dim(0));
  const int64_t across = div_ceil(a.y.count, kTileCols);
  with_float_type(a.y_RM.dtype, [&]<class T>(T) {
    s.pool().run(groups.num_tiles() * across, [&](int64_t task, int worker) {
      product_tile<T>(a, groups.tile(task / across), task % across * kTileCols,
                      static_cast<char*>(a.scratch.data) + worker * space_of(a));
    });
  });
}

void low_rank_wgrad(Stream& s, const LowRankWgrad& a) {
  const Groups groups(a.rows, a.gather_left ? a.right_RN.dim(0) : a.left_RM.dim(0));
  const int64_t across = div_ceil(a.right.count, kTileCols), tiles = div_ceil(a.left.count, kTileRows) * across;
  with_float_type(a.left_RM.dtype, [&]<class T>(T) {
    s.pool().run(groups.count * tiles, [&](int64_t task, int worker) {
      const Range rows = groups.of(task / tiles);
      const int64_t tile = task % tiles;
      if (rows.begin == rows.end) return;
      wgrad_tile<T>(a, rows, tile / across * kTileRows, tile % across * kTileCols,
                    static_cast<char*>(a.scratch.data) + worker * kWgradSpace);
    });
  });
}

}  // namespace cpu

int64_t cpu::scratch_bytes(const LowRankProduct& a, int num_threads) { return num_threads * cpu::space_of(a); }
int64_t cpu::scratch_bytes(const LowRankWgrad&, int num_threads) { return num_threads * cpu::kWgradSpace; }

}  // namespace moebius
