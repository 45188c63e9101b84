// Operands of fp8_block and scratch on the step stack, for the backward pass of experts.
#pragma once

#include "core/quantized.h"
#include "model/step.h"

namespace moebius {

// An operand on the step stack with a scale for 128 elements of a row.
inline Operand alloc_row_blocks(Step& step, const Shape& shape, bool transposed) {
  constexpr ScaleLayout kLayout = ScaleLayout::row_blocks;
  Operand q(step.alloc(shape, DType::f8_e4m3), step.alloc(scale_shape(kLayout, shape), scale_dtype(kLayout)), kLayout);
  q.transposed = transposed;
  return q;
}

// Returns a tensor of this shape in the first elements of `of`. REQUIRES: `of` has at least this many elements.
inline Tensor first_elements(Tensor of, const Shape& shape) {
  MOEBIUS_ASSERT(shape.numel() <= of.numel());
  of.shape = shape;
  return of;
}

}  // namespace moebius
