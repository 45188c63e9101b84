// An operand of a product: a matrix, and the scales of its elements where it is quantised.
//
//   value = data * scale        with nv_blocks: data * scale * tensor_scale
//
// Elements that share a scale are a block. Blocks begin at the first row and column, and those at
// the end may be smaller. For data [R, C] there are these layouts:
//
//   layout         block      scales
//   per_tensor     all of it  f32 [1]
//   row_blocks     1 x 128    f32 [R, ceil(C / 128)]
//   square_blocks  128 x 128  f32 [ceil(R / 128), ceil(C / 128)]
//   mx_blocks      1 x 32     e8m0 [R, ceil(C / 32)]
//   nv_blocks      1 x 16     f8_e4m3 [R, ceil(C / 16)], and tensor_scale f32 [1]
//
// Data of rank 3 is a matrix for each expert. Scales then have the same first dim, and per_tensor
// and tensor_scale are f32 [e]. Elements are f8_e4m3 or f8_e5m2, and f4_e2m1 with nv_blocks.
// An f4_e2m1 tensor has an even number of columns and two elements a byte, the first in the low half.
//
// Scales are powers of two, except those of nv_blocks. A block of zeros has scale 1, in nv_blocks 0.
// A block that holds a NaN or an infinity has the scale NaN, so that all of its values are NaN: a
// product does not hide them. Sources: DeepSeek-V3 (arXiv 2412.19437, section 3.3), OCP Microscaling Formats
// 1.0, and NVIDIA's NVFP4 recipe (arXiv 2509.25149).
#pragma once

#include <string_view>

#include "core/tensor.h"

namespace moebius {

enum class ScaleLayout : uint8_t { none, per_tensor, row_blocks, square_blocks, mx_blocks, nv_blocks };

std::string_view name_of(ScaleLayout layout);

// The rows and columns of a block. A whole tensor counts as one of any size: {0, 0}.
struct BlockSize {
  int64_t rows = 0, cols = 0;
};
BlockSize block_size(ScaleLayout layout);

// The dtype and the shape of the scales of data. REQUIRES: a layout other than none; rank 2 or 3.
DType scale_dtype(ScaleLayout layout);
Shape scale_shape(ScaleLayout layout, const Shape& data);
Shape tensor_scale_shape(const Shape& data);  // of nv_blocks: [1], or [e]

// A plain tensor is an operand without scales, so callers that do not quantise pass a Tensor.
struct Operand {
  Operand() = default;
  Operand(Tensor data) : data(data) {}  // not explicit: see above
  Operand(Tensor data, Tensor scales, ScaleLayout layout) : data(data), scales(scales), layout(layout) {}

  bool is_plain() const { return scales.empty() && layout == ScaleLayout::none; }
  // The shape of the matrix that the product names: that of data, or of its transpose.
  Shape shape() const;

  Tensor data;
  Tensor scales;
  ScaleLayout layout = ScaleLayout::none;
  // Data and scales hold the transpose of each matrix that the product names. Products of quantised
  // operands sum along the rows of data on both sides, so some operands are transposed.
  bool transposed = false;
  Tensor tensor_scale;  // with nv_blocks
};

// The transpose of rows that are sorted by expert: data [C, padded], where each expert begins at a
// multiple of kGroupAlign columns, so that no block has rows of two experts. Columns without a row
// are zeros. The row r of expert e is column
//   group_begin(offsets[e], e) + r - offsets[e]
// so the place of a row follows from the offsets alone, and the width from the bound R.
inline constexpr int64_t kGroupAlign = 128;
constexpr int64_t group_begin(int64_t offset, int64_t expert) { return (offset / kGroupAlign + expert) * kGroupAlign; }
constexpr int64_t padded_rows(int64_t R, int64_t num_experts) { return group_begin(R, num_experts); }
// The same without experts: R rounded up to a multiple of kGroupAlign.
constexpr int64_t padded_rows(int64_t R) { return (R + kGroupAlign - 1) / kGroupAlign * kGroupAlign; }

// "f8_e4m3[4, 8] with row_blocks scales f32[4, 1]"; "transposed " before it where it is.
std::string to_string(const Operand& operand);

// Throws Error{usage} "who: name has no quantised form yet; ..." unless the operand is plain.
// Ops that compute only with plain tensors call it.
void check_plain(const char* who, const char* name, const Operand& operand);

// Throws Error{usage} "who: name ..." unless the operand has a layout, the element dtype and the
// scales that the layout needs, and the memory for them.
void check_quantised(const char* who, const char* name, const Operand& operand);

// The same for an operand of a product that names a matrix of this shape. Products of quantised
// operands sum along the rows of data: `transposed` is what the operand must be for that.
void check_quantised(const char* who, const char* name, const Operand& operand, const Shape& shape, bool transposed);

// For a product of two operands: both are plain, or both are quantised. Returns whether they are
// quantised. Error{usage} names both where only one is.
bool check_both_quantised(const char* who, const char* a_name, const Operand& a, const char* b_name, const Operand& b);

}  // namespace moebius
