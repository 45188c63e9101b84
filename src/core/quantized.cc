#include "core/quantized.h"

#include <fmt/format.h>

namespace moebius {
namespace {

int64_t blocks_in(int64_t size, int64_t block) { return (size + block - 1) / block; }

// MXFP4 is f4_e2m1 with mx_blocks. Released weights have this format; quantize() does not write it.
bool is_element(DType dtype, ScaleLayout layout) {
  if (layout == ScaleLayout::nv_blocks) return dtype == DType::f4_e2m1;
  if (layout == ScaleLayout::mx_blocks && dtype == DType::f4_e2m1) return true;
  return dtype == DType::f8_e4m3 || dtype == DType::f8_e5m2;
}

}  // namespace

std::string_view name_of(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::none:
      return "no";
    case ScaleLayout::per_tensor:
      return "per_tensor";
    case ScaleLayout::row_blocks:
      return "row_blocks";
    case ScaleLayout::square_blocks:
      return "square_blocks";
    case ScaleLayout::mx_blocks:
      return "mx_blocks";
    case ScaleLayout::nv_blocks:
      return "nv_blocks";
  }
  return "unknown";
}

BlockSize block_size(ScaleLayout layout) {
  switch (layout) {
    case ScaleLayout::none:
    case ScaleLayout::per_tensor:
      return {};
    case ScaleLayout::row_blocks:
      return {1, 128};
    case ScaleLayout::square_blocks:
      return {128, 128};
    case ScaleLayout::mx_blocks:
      return {1, 32};
    case ScaleLayout::nv_blocks:
      return {1, 16};
  }
  MOEBIUS_ASSERT(!"unknown layout of scales");
}

DType scale_dtype(ScaleLayout layout) {
  MOEBIUS_ASSERT(layout != ScaleLayout::none);
  if (layout == ScaleLayout::mx_blocks) return DType::e8m0;
  return layout == ScaleLayout::nv_blocks ? DType::f8_e4m3 : DType::f32;
}

Shape tensor_scale_shape(const Shape& data) { return {data.rank() == 3 ? data[0] : 1}; }

Shape scale_shape(ScaleLayout layout, const Shape& data) {
  MOEBIUS_ASSERT(layout != ScaleLayout::none && (data.rank() == 2 || data.rank() == 3));
  if (layout == ScaleLayout::per_tensor) return tensor_scale_shape(data);
  const BlockSize block = block_size(layout);
  const int first = data.rank() - 2;
  const int64_t rows = blocks_in(data[first], block.rows), cols = blocks_in(data[first + 1], block.cols);
  return first == 0 ? Shape{rows, cols} : Shape{data[0], rows, cols};
}

Shape Operand::shape() const {
  if (!transposed) return data.shape;
  if (data.shape.rank() == 2) return {data.dim(1), data.dim(0)};
  MOEBIUS_ASSERT(data.shape.rank() == 3);
  return {data.dim(0), data.dim(2), data.dim(1)};
}

std::string to_string(const Operand& operand) {
  const std::string data = fmt::format("{}{}", operand.transposed ? "transposed " : "", to_string(operand.data));
  if (operand.is_plain()) return data;
  return fmt::format("{} with {} scales {}", data, name_of(operand.layout), to_string(operand.scales));
}

void check_plain(const char* who, const char* name, const Operand& operand) {
  MOEBIUS_CHECK(usage, operand.is_plain(),
                "{}: {} has no quantised form yet; expected an f32 or bf16 tensor without scales, got {}", who, name,
                to_string(operand));
}

void check_quantised(const char* who, const char* name, const Operand& operand) {
  const Tensor& data = operand.data;
  MOEBIUS_CHECK(usage, operand.layout != ScaleLayout::none && (data.shape.rank() == 2 || data.shape.rank() == 3),
                "{}: {} must be a matrix, or one for each expert, with a layout of scales; got {}", who, name,
                to_string(operand));
  MOEBIUS_CHECK(usage, is_element(data.dtype, operand.layout), "{}: {} with {} scales must be {}; got {}", who, name,
                name_of(operand.layout), operand.layout == ScaleLayout::nv_blocks ? "f4_e2m1" : "f8_e4m3 or f8_e5m2",
                to_string(data));
  MOEBIUS_CHECK(usage, data.dtype != DType::f4_e2m1 || data.dim(data.shape.rank() - 1) % 2 == 0,
                "{}: {} has two elements a byte and needs an even number of columns; got {}", who, name,
                to_string(data));
  check_tensor(who, name, data, data.dtype, data.shape);
  const std::string scales = fmt::format("the scales of {}", name);
  check_tensor(who, scales.c_str(), operand.scales, scale_dtype(operand.layout),
               scale_shape(operand.layout, data.shape));
  if (operand.layout != ScaleLayout::nv_blocks) return;
  const std::string tensor_scale = fmt::format("the tensor scale of {}", name);
  check_tensor(who, tensor_scale.c_str(), operand.tensor_scale, DType::f32, tensor_scale_shape(data.shape));
}

void check_quantised(const char* who, const char* name, const Operand& operand, const Shape& shape, bool transposed) {
  check_quantised(who, name, operand);
  MOEBIUS_CHECK(usage, operand.transposed == transposed && operand.shape() == shape,
                "{}: {} must be {}quantised data of {}, since the product sums along the rows of data; got {}", who,
                name, transposed ? "the transposed " : "", to_string(shape), to_string(operand));
}

bool check_both_quantised(const char* who, const char* a_name, const Operand& a, const char* b_name, const Operand& b) {
  MOEBIUS_CHECK(usage, a.is_plain() == b.is_plain(),
                "{}: {} and {} must both be quantised, or both plain; got {} and {}", who, a_name, b_name, to_string(a),
                to_string(b));
  return !a.is_plain();
}

}  // namespace moebius
