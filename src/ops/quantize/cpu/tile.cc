#include "ops/quantize/cpu/tile.h"

#include "ops/cpu/vector.h"

namespace moebius::cpu {
namespace {

int64_t last_offset(const Tensor& offsets_e1) { return offsets_e1.ptr<int32_t>()[offsets_e1.numel() - 1]; }

// Rows of x in the columns of a transposed tile: [begin, end), in a group.
struct SourceRows {
  int64_t group, begin, end;
};

SourceRows rows_of(const Quantize& a, const Tile& tile) {
  if (a.offsets_e1.empty()) {
    const int64_t R = a.x_RC.dim(a.x_RC.shape.rank() - 2);
    return {0, std::min(tile.col, R), std::min(tile.col + tile.cols, R)};
  }
  const int32_t* offsets = a.offsets_e1.ptr<int32_t>();
  int64_t e = a.offsets_e1.numel() - 2;
  while (e > 0 && group_begin(offsets[e], e) > tile.col) --e;
  const int64_t begin = offsets[e] + tile.col - group_begin(offsets[e], e), end = offsets[e + 1];
  return {e, std::min(begin, end), std::min(begin + tile.cols, end)};
}

template <class T>
void load_rows(float* x, const Quantize& a, const Tile& tile) {
  const int rank = a.x_RC.shape.rank();
  const int64_t R = a.x_RC.dim(rank - 2), C = a.x_RC.dim(rank - 1);
  const T* from = a.x_RC.ptr<T>() + (tile.matrix * R + tile.row) * C + tile.col;
  for (int64_t i = 0; i < tile.rows; ++i) {
#pragma omp simd
    for (int64_t j = 0; j < tile.cols; ++j) x[i * kTile + j] = to_f32(from[i * C + j]);
  }
}

template <class T>
void load_columns(float* x, const Quantize& a, const Tile& tile) {
  const int rank = a.x_RC.shape.rank();
  const int64_t R = a.x_RC.dim(rank - 2), C = a.x_RC.dim(rank - 1);
  const SourceRows rows = rows_of(a, tile);
  const int32_t* token = a.token_R.empty() ? nullptr : a.token_R.ptr<int32_t>();
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    const T* from = a.x_RC.ptr<T>() + (tile.matrix * R + (token ? token[r] : r)) * C + tile.row;
    for (int64_t i = 0; i < tile.rows; ++i) x[i * kTile + r - rows.begin] = to_f32(from[i]);
  }
  for (int64_t i = 0; i < tile.rows; ++i)
    std::fill(x + i * kTile + rows.end - rows.begin, x + i * kTile + tile.cols, 0.0f);
}

}  // namespace

Tiles::Tiles(const Quantize& a) {
  const Tensor& data = a.q.data;
  const int rank = data.shape.rank();
  num_matrices_ = rank == 3 ? data.dim(0) : 1;
  rows_ = data.dim(rank - 2);
  cols_ = data.dim(rank - 1);
  if (!a.offsets_e1.empty() && !a.q.transposed) rows_ = last_offset(a.offsets_e1);
  down_ = div_ceil(rows_, kTile);
  across_ = div_ceil(cols_, kTile);
}

Tile Tiles::tile(int64_t index) const {
  const int64_t of_matrix = index % (down_ * across_);
  const int64_t row = of_matrix / across_ * kTile, col = of_matrix % across_ * kTile;
  return {index / (down_ * across_), row, col, std::min(kTile, rows_ - row), std::min(kTile, cols_ - col)};
}

void load_tile(float* x, const Quantize& a, const Tile& tile) {
  with_float_type(a.x_RC.dtype,
                  [&]<class T>(T) { a.q.transposed ? load_columns<T>(x, a, tile) : load_rows<T>(x, a, tile); });
  if (!a.hadamard) return;
  for (int64_t i = 0; i < tile.rows; ++i) {
    for (int64_t j = 0; j < tile.cols; j += kHadamard) hadamard(x + i * kTile + j);
  }
}

Draws::Draws(const Quantize& a, const Tile& tile)
    : rng_(a.stochastic.seed, RngSite::rounding, static_cast<uint64_t>(a.stochastic.draw_2.ptr<int64_t>()[0]),
           a.stochastic.key),
      transposed_(a.q.transposed),
      C_(a.x_RC.dim(a.x_RC.shape.rank() - 1)),
      first_col_(transposed_ ? tile.row : tile.col) {
  const StochasticRounding& how = a.stochastic;
  const int32_t* offsets = a.offsets_e1.empty() ? nullptr : a.offsets_e1.ptr<int32_t>();
  SourceRows rows = transposed_ ? rows_of(a, tile) : SourceRows{0, tile.row, tile.row + tile.rows};
  for (int64_t r = rows.begin; r < rows.end; ++r) {
    while (offsets && r >= offsets[rows.group + 1]) ++rows.group;
    const int64_t row = how.draw_2.ptr<int64_t>()[1] + r - (offsets ? offsets[rows.group] : 0);
    row_[r - rows.begin] = row * how.num_groups + how.first_group + rows.group + tile.matrix;
  }
  // Padding is zeros, which no draw changes, unless a Hadamard transform mixes them with rows: then they draw
  // as row 0 does.
  std::fill(row_ + (rows.end - rows.begin), row_ + kTile, 0);
}

}  // namespace moebius::cpu
