// A tile of a quantised matrix: up to 128 x 128 elements of q.data, as the f32 numbers that they
// stand for. Every block of every layout is inside one tile.
#pragma once

#include <algorithm>

#include "ops/quantize/hadamard.h"
#include "ops/quantize/quantize.h"

namespace moebius::cpu {

constexpr int64_t kTile = 128;
static_assert(kGroupAlign % kTile == 0);

struct Tile {
  int64_t matrix, row, col;  // coordinates in q.data
  int64_t rows, cols;
};

// The tiles of a q.data, row after row. With offsets and without transposing, the rows past the last
// offset have none.
class Tiles {
 public:
  explicit Tiles(const Quantize& a);
  int64_t count() const { return num_matrices_ * down_ * across_; }
  int64_t num_matrices() const { return num_matrices_; }
  Tile tile(int64_t index) const;

 private:
  int64_t num_matrices_, rows_, cols_, down_, across_;
};

// x of the tile at x[i * kTile + j], after the Hadamard transform where it is asked for. Columns
// of padding are zeros.
void load_tile(float* x, const Quantize& a, const Tile& tile);

// The bits of the largest magnitude among rows x cols numbers: as integers magnitudes are ordered,
// with infinity and then NaN above all numbers.
inline uint32_t largest_bits(const float* x, int64_t rows, int64_t cols) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < rows; ++i) {
#pragma omp simd reduction(max : largest)
    for (int64_t j = 0; j < cols; ++j)
      largest = std::max(largest, std::bit_cast<uint32_t>(x[i * kTile + j]) & 0x7fffffffu);
  }
  return largest;
}

// The draws of StochasticRounding, quantize.h, for the elements of a tile.
class Draws {
 public:
  Draws(const Quantize& a, const Tile& tile);
  // In (0, 1).
  float uniform(int64_t i, int64_t j) const {
    const int64_t of_x = transposed_ ? j : i, col = first_col_ + (transposed_ ? i : j);
    return rng_.uniform(static_cast<uint64_t>(row_[of_x] * C_ + col));
  }

 private:
  Rng rng_;
  bool transposed_;
  int64_t C_, first_col_;
  int64_t row_[kTile];  // of each row of x in the tile: (first row + r) * num_groups + first_group + g
};

}  // namespace moebius::cpu
