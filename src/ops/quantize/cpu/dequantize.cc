#include "ops/quantize/cpu/dequantize.h"

#include <algorithm>

#include "core/narrow_float.h"
#include "ops/cpu/vector.h"
#include "ops/quantize/cpu/tile.h"
#include "ops/quantize/quantize.h"
#include "ops/quantize/quantize_backends.h"

namespace moebius::cpu {
namespace {

struct Sizes {
  explicit Sizes(const Shape& shape) : rows(shape[shape.rank() - 2]), cols(shape[shape.rank() - 1]) {}
  int64_t rows, cols;
};

float scale_at(const Operand& q, int64_t matrix, int64_t row, int64_t col) {
  if (q.layout == ScaleLayout::per_tensor) return q.scales.ptr<float>()[matrix];
  const Sizes scales(q.scales.shape);
  const BlockSize block = block_size(q.layout);
  const int64_t at = (matrix * scales.rows + row / block.rows) * scales.cols + col / block.cols;
  if (q.layout == ScaleLayout::mx_blocks) return to_f32(q.scales.ptr<e8m0>()[at]);
  if (q.layout != ScaleLayout::nv_blocks) return q.scales.ptr<float>()[at];
  return to_f32(q.scales.ptr<f8_e4m3>()[at]) * q.tensor_scale.ptr<float>()[matrix];
}

// Dequantises n elements that have one scale, from element `first` of the data on.
void dequantize_run(float* to, const Tensor& data, int64_t first, int64_t n, float scale) {
  const auto* bytes = static_cast<const uint8_t*>(data.data);
  if (data.dtype == DType::f4_e2m1) {
    for (int64_t j = 0; j < n; ++j) {
      const uint32_t pair = bytes[(first + j) / 2];
      to[j] = kF4E2m1Values[(first + j) % 2 == 0 ? pair & 15u : pair >> 4] * scale;
    }
    return;
  }
  const float* values = data.dtype == DType::f8_e4m3 ? kF8E4m3Values.data() : kF8E5m2Values.data();
  for (int64_t j = 0; j < n; ++j) to[j] = values[bytes[first + j]] * scale;
}

}  // namespace

void dequantize_row(float* to, const Operand& q, int64_t matrix, int64_t row, int64_t col, int64_t n) {
  const Sizes data(q.data.shape);
  const int64_t first = (matrix * data.rows + row) * data.cols, block = block_size(q.layout).cols;
  for (int64_t j = col; j < col + n;) {
    const int64_t end = block == 0 ? col + n : std::min(col + n, (j / block + 1) * block);
    dequantize_run(to + j - col, q.data, first + j, end - j, scale_at(q, matrix, row, j));
    j = end;
  }
}

void dequantize(Stream& s, const Dequantize& a) {
  const Sizes data(a.q.data.shape);
  with_float_type(a.x.dtype, [&]<class T>(T) {
    parallel_rows(s.pool(), a.x.numel() / data.cols, 64, [&](int64_t begin, int64_t end) {
      float piece[512];
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t j = 0; j < data.cols; j += std::ssize(piece)) {
          const int64_t n = std::min(std::ssize(piece), data.cols - j);
          dequantize_row(piece, a.q, row / data.rows, row % data.rows, j, n);
          for (int64_t k = 0; k < n; ++k) a.x.ptr<T>()[row * data.cols + j + k] = from_f32<T>(piece[k]);
        }
      }
    });
  });
}

namespace {

// The rows [first, last) of a group of x. Row r of x is column r + shift of the transposed operand.
struct GroupRows {
  int64_t first, last, shift;
};

GroupRows rows_of_group(const DequantizeTransposed& a, int64_t g) {
  if (a.offsets_e1.empty()) return {.first = 0, .last = Sizes(a.x_RC.shape).rows, .shift = 0};
  const int32_t* offsets = a.offsets_e1.ptr<int32_t>();
  return {.first = offsets[g], .last = offsets[g + 1], .shift = group_begin(offsets[g], g) - offsets[g]};
}

// Writes the rows of a group in one column of x: row `col` of the transposed operand.
template <class T>
void dequantize_column(const DequantizeTransposed& a, const GroupRows& group, int64_t matrix, int64_t col) {
  const Sizes x(a.x_RC.shape);
  T* to = a.x_RC.ptr<T>() + matrix * x.rows * x.cols + col;
  float piece[512];
  for (int64_t r = group.first; r < group.last; r += std::ssize(piece)) {
    const int64_t n = std::min(std::ssize(piece), group.last - r);
    dequantize_row(piece, a.q, matrix, col, r + group.shift, a.hadamard ? div_ceil(n, kHadamard) * kHadamard : n);
    for (int64_t k = 0; a.hadamard && k < n; k += kHadamard) undo_hadamard(piece + k);
    for (int64_t k = 0; k < n; ++k) to[(r + k) * x.cols] = from_f32<T>(piece[k]);
  }
}

}  // namespace

void dequantize_transposed(Stream& s, const DequantizeTransposed& a) {
  const Sizes x(a.x_RC.shape);
  const int64_t num_groups = a.offsets_e1.empty() ? 1 : a.offsets_e1.numel() - 1;
  with_float_type(a.x_RC.dtype, [&]<class T>(T) {
    parallel_rows(s.pool(), a.x_RC.numel() / x.rows, 8, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        for (int64_t g = 0; g < num_groups; ++g) dequantize_column<T>(a, rows_of_group(a, g), i / x.cols, i % x.cols);
      }
    });
  });
}

}  // namespace moebius::cpu
