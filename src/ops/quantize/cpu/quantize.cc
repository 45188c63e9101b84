#include "ops/quantize/quantize.h"

#include <atomic>
#include <optional>
#include <vector>

#include "ops/cpu/vector.h"
#include "ops/quantize/cpu/stats.h"
#include "ops/quantize/cpu/tile.h"
#include "ops/quantize/quantize_backends.h"
#include "ops/quantize/scales.h"

namespace moebius::cpu {
namespace {

template <class Code>
void encode_row(uint8_t* to, const float* x, int64_t n, float inverse, Code code) {
#pragma omp simd
  for (int64_t j = 0; j < n; ++j) to[j] = code(x[j] * inverse);
}

void encode_f8(const Operand& q, const Tile& tile, int64_t i, int64_t j, const float* x, int64_t n, float inverse) {
  const Tensor& data = q.data;
  const int rank = data.shape.rank();
  const int64_t R = data.dim(rank - 2), C = data.dim(rank - 1);
  auto* to = static_cast<uint8_t*>(data.data) + (tile.matrix * R + tile.row + i) * C + tile.col + j;
  if (data.dtype == DType::f8_e4m3)
    encode_row(to, x, n, inverse, [](float v) { return to_f8_e4m3(v).bits; });
  else
    encode_row(to, x, n, inverse, [](float v) { return to_f8_e5m2(v).bits; });
}

// Everything that the blocks of a matrix share: of a tensor with one scale or nv_blocks.
struct MatrixScale {
  float scale = 1, encode = 1;
};

class Quantizer {
 public:
  Quantizer(const Quantize& a, const std::vector<MatrixScale>& of) : a_(a), q_(a.q), of_(of) {}

  void run(const Tile& tile) const {
    float x[kTile * kTile];
    load_tile(x, a_, tile);
    switch (q_.layout) {
      case ScaleLayout::per_tensor:
        return encode_blocks(tile, x, {tile.rows, tile.cols}, [&](auto...) { return of_[tile.matrix].scale; });
      case ScaleLayout::square_blocks:
        return encode_blocks(tile, x, {tile.rows, tile.cols}, [&](int64_t i, int64_t j, uint32_t m) {
          return *scale_at<float>(tile, i, j) = power_of_two_scale(m, top_exponent(q_.data.dtype));
        });
      case ScaleLayout::row_blocks:
        return encode_blocks(tile, x, {1, tile.cols}, [&](int64_t i, int64_t j, uint32_t m) {
          return *scale_at<float>(tile, i, j) = power_of_two_scale(m, top_exponent(q_.data.dtype));
        });
      case ScaleLayout::mx_blocks:
        return encode_blocks(tile, x, {1, 32}, [&](int64_t i, int64_t j, uint32_t m) {
          const float scale = power_of_two_scale(m, top_exponent(q_.data.dtype));
          *scale_at<e8m0>(tile, i, j) = to_e8m0(scale);
          return scale;
        });
      case ScaleLayout::nv_blocks:
        return encode_nv(tile, x);
      case ScaleLayout::none:
        MOEBIUS_ASSERT(!"quantize checks its layout");
    }
  }

 private:
  // The scale of the block that element (i, j) of the tile is in.
  template <class T>
  T* scale_at(const Tile& tile, int64_t i, int64_t j) const {
    const BlockSize block = block_size(q_.layout);
    const Tensor& scales = q_.scales;
    const int rank = scales.shape.rank();
    const int64_t rows = scales.dim(rank - 2), cols = scales.dim(rank - 1);
    return scales.ptr<T>() + (tile.matrix * rows + (tile.row + i) / block.rows) * cols + (tile.col + j) / block.cols;
  }

  // Elements of f8: scale(i, j, largest bits) stores and gives the scale of the block at (i, j).
  template <class Scale>
  void encode_blocks(const Tile& tile, const float* x, BlockSize block, Scale scale) const {
    for (int64_t i = 0; i < tile.rows; i += block.rows) {
      for (int64_t j = 0; j < tile.cols; j += block.cols) {
        const int64_t rows = std::min(block.rows, tile.rows - i), cols = std::min(block.cols, tile.cols - j);
        const float inverse = 1.0f / scale(i, j, largest_bits(x + i * kTile + j, rows, cols));
        for (int64_t r = i; r < i + rows; ++r) encode_f8(q_, tile, r, j, x + r * kTile + j, cols, inverse);
      }
    }
  }

  void encode_nv(const Tile& tile, const float* x) const {
    const BlockSize block{a_.square ? 16 : 1, 16};
    std::optional<Draws> draws;
    if (!a_.stochastic.draw_2.empty()) draws.emplace(a_, tile);
    for (int64_t i = 0; i < tile.rows; i += block.rows) {
      for (int64_t j = 0; j < tile.cols; j += block.cols) {
        const int64_t rows = std::min(block.rows, tile.rows - i), cols = std::min(block.cols, tile.cols - j);
        const float inverse = store_nv_scales(tile, i, j, rows, largest_bits(x + i * kTile + j, rows, cols));
        for (int64_t r = i; r < i + rows; ++r) encode_f4(tile, r, j, x, cols, inverse, draws);
      }
    }
  }

  // Stores the scale of rows [i, i + rows) and returns the factor for their elements.
  float store_nv_scales(const Tile& tile, int64_t i, int64_t j, int64_t rows, uint32_t m_bits) const {
    const MatrixScale& of = of_[tile.matrix];
    const f8_e4m3 scale = nv_block_scale(m_bits, of.encode);
    for (int64_t r = i; r < i + rows; ++r) *scale_at<f8_e4m3>(tile, r, j) = scale;
    return nv_inverse(scale, of.scale);
  }

  void encode_f4(const Tile& tile, int64_t i, int64_t j, const float* x, int64_t n, float inverse,
                 const std::optional<Draws>& draws) const {
    const int rank = q_.data.shape.rank();
    const int64_t R = q_.data.dim(rank - 2), C = q_.data.dim(rank - 1);
    auto* to = static_cast<uint8_t*>(q_.data.data) + ((tile.matrix * R + tile.row + i) * C + tile.col + j) / 2;
    const auto code = [&](int64_t col) {
      const float v = x[i * kTile + col] * inverse;
      return draws ? draw_f4_e2m1(v, draws->uniform(i, col)) : to_f4_e2m1(v);
    };
    for (int64_t p = 0; p < n / 2; ++p) to[p] = static_cast<uint8_t>(code(j + 2 * p) | code(j + 2 * p + 1) << 4);
  }

  const Quantize& a_;
  const Operand& q_;
  const std::vector<MatrixScale>& of_;
};

// The bits of the largest magnitude of each matrix. A maximum does not depend on the order.
std::vector<uint32_t> largest_of_matrices(Stream& s, const Quantize& a, const Tiles& tiles) {
  std::vector<std::atomic<uint32_t>> largest(static_cast<size_t>(tiles.num_matrices()));
  s.pool().run(tiles.count(), [&](int64_t index, int) {
    float x[kTile * kTile];
    const Tile tile = tiles.tile(index);
    load_tile(x, a, tile);
    const uint32_t here = largest_bits(x, tile.rows, tile.cols);
    std::atomic<uint32_t>& all = largest[static_cast<size_t>(tile.matrix)];
    for (uint32_t old = all.load(); old < here && !all.compare_exchange_weak(old, here);) {
    }
  });
  return {largest.begin(), largest.end()};
}

std::vector<uint32_t> largest_of_ranks(const Quantize& a, size_t matrices) {
  std::vector<uint32_t> largest(matrices);
  const int64_t B = a.magnitude_WB.dim(1);
  for (int64_t r = 0; r < a.magnitude_WB.dim(0); ++r) {
    const int32_t* of_rank = a.magnitude_WB.ptr<int32_t>() + r * B + a.first_matrix;
    for (size_t e = 0; e < matrices; ++e) largest[e] = std::max(largest[e], static_cast<uint32_t>(of_rank[e]));
  }
  return largest;
}

// Stores the scales that a whole matrix has.
std::vector<MatrixScale> matrix_scales(Stream& s, const Quantize& a, const Tiles& tiles) {
  std::vector<MatrixScale> scales(static_cast<size_t>(tiles.num_matrices()));
  const bool is_nv = a.q.layout == ScaleLayout::nv_blocks;
  if (!is_nv && a.q.layout != ScaleLayout::per_tensor) return scales;
  const std::vector<uint32_t> largest =
      a.magnitude_WB.empty() ? largest_of_matrices(s, a, tiles) : largest_of_ranks(a, scales.size());
  for (size_t e = 0; e < scales.size(); ++e) {
    const uint32_t m = largest[e];
    if (is_nv) scales[e].encode = nv_encode_scale(m);
    scales[e].scale = is_nv ? 1.0f / scales[e].encode : power_of_two_scale(m, top_exponent(a.q.data.dtype));
    (is_nv ? a.q.tensor_scale : a.q.scales).ptr<float>()[e] = scales[e].scale;
  }
  return scales;
}

}  // namespace

void quantize(Stream& s, const Quantize& a) {
  const Tiles tiles(a);
  const std::vector<MatrixScale> of = matrix_scales(s, a, tiles);
  const Quantizer quantizer(a, of);
  s.pool().run(tiles.count(), [&](int64_t index, int) { quantizer.run(tiles.tile(index)); });
  if (!a.stats_5.empty()) add_stats(s, a);
}

void largest_magnitudes(Stream& s, const LargestMagnitudes& a) {
  const std::vector<uint32_t> largest = largest_of_matrices(s, a.of, Tiles(a.of));
  std::copy(largest.begin(), largest.end(), a.bits_e.ptr<int32_t>());
}

void transpose_quantized(Stream& s, const TransposeQuantized& a) {
  const auto transpose = [&](auto* to, const auto* from, const Shape& shape) {
    const int rank = shape.rank();
    const int64_t matrices = rank == 3 ? shape[0] : 1, R = shape[rank - 2], C = shape[rank - 1];
    parallel_rows(s.pool(), matrices * C, kTile, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        const auto* column = from + row / C * R * C + row % C;
        for (int64_t r = 0; r < R; ++r) to[row * R + r] = column[r * C];
      }
    });
  };
  transpose(static_cast<uint8_t*>(a.out.data.data), static_cast<const uint8_t*>(a.in.data.data), a.in.data.shape);
  if (a.in.layout == ScaleLayout::per_tensor) {
    std::copy_n(a.in.scales.ptr<float>(), a.in.scales.numel(), a.out.scales.ptr<float>());
    return;
  }
  transpose(a.out.scales.ptr<float>(), static_cast<const float*>(a.in.scales.ptr<float>()), a.in.scales.shape);
}

}  // namespace moebius::cpu
