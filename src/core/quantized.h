// An operand of a matrix product: a tensor, and the scales of its elements if it is quantised.
//
//   value = data * scale        with nv_blocks: data * scale * tensor_scale
//
// The elements that share a scale form a block. Blocks begin at the first row and column, and the last ones
// may be smaller. For data [R, C] the layouts are:
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
// An f4_e2m1 tensor has an even number of columns and two elements per byte, the first in the low half.
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

// The rows and columns of a block; {0, 0} if the block is the whole tensor.
struct BlockSize {
  int64_t rows = 0, cols = 0;
};
BlockSize block_size(ScaleLayout layout);

// Return the dtype and the shape of the scales of data. REQUIRES: layout is not none; data has rank 2 or 3.
DType scale_dtype(ScaleLayout layout);
Shape scale_shape(ScaleLayout layout, const Shape& data);
Shape tensor_scale_shape(const Shape& data);  // shape with nv_blocks: [1], or [e]

// A plain tensor is an operand without scales, so callers that do not quantise pass a Tensor.
struct Operand {
  Operand() = default;
  Operand(Tensor data) : data(data) {}  // not explicit: see above
  Operand(Tensor data, Tensor scales, ScaleLayout layout) : data(data), scales(scales), layout(layout) {}

  bool is_plain() const { return scales.empty() && layout == ScaleLayout::none; }
  Shape shape() const;  // shape of data, or of its transpose if `transposed`

  Tensor data;
  Tensor scales;
  ScaleLayout layout = ScaleLayout::none;
  // True: data and scales hold the transpose of each matrix. A product of quantised operands sums along the rows of
  // data on both sides, so one side may have to be stored transposed.
  bool transposed = false;
  Tensor tensor_scale;  // set with nv_blocks
};

// The layout of the transpose of rows [R, C] that are sorted by expert: data [C, padded_rows(R, e)]. Each expert
// begins at a multiple of kGroupAlign columns, so that no block has rows of two experts. Columns without a row are
// zeros. Row r of expert e is column
//   group_begin(offsets[e], e) + r - offsets[e]
// So the offsets alone give the column of a row, and the bound R alone gives the width.
inline constexpr int64_t kGroupAlign = 128;
constexpr int64_t group_begin(int64_t offset, int64_t expert) { return (offset / kGroupAlign + expert) * kGroupAlign; }
constexpr int64_t padded_rows(int64_t R, int64_t num_experts) { return group_begin(R, num_experts); }
// Returns the same without experts: R rounded up to a multiple of kGroupAlign.
constexpr int64_t padded_rows(int64_t R) { return (R + kGroupAlign - 1) / kGroupAlign * kGroupAlign; }

// Returns "f8_e4m3[4, 8] with row_blocks scales f32[4, 1]", after "transposed " if the operand is transposed.
std::string to_string(const Operand& operand);

// Throws Error{usage} "who: name has no quantised form yet; ..." unless the operand is plain.
// Ops that compute only with plain tensors call it.
void check_plain(const char* who, const char* name, const Operand& operand);

// Throws Error{usage} "who: name ..." unless the operand has a layout, the element dtype and the
// scales that the layout needs, and the memory for them.
void check_quantised(const char* who, const char* name, const Operand& operand);

// Also checks that the operand has this shape, and that its `transposed` is as given, so that the product sums along
// the rows of its data.
void check_quantised(const char* who, const char* name, const Operand& operand, const Shape& shape, bool transposed);

// Returns whether both operands of a product are quantised; false if both are plain. Throws Error{usage} that names
// both if only one is quantised.
bool check_both_quantised(const char* who, const char* a_name, const Operand& a, const char* b_name, const Operand& b);

}  // namespace moebius
