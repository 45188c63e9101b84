// Operands of fp8_block and scratch on the step stack, for the backward pass of experts.
#pragma once

#include "core/quantized.h"
#include "model/step.h"

namespace moebius {

// Allocates an operand on the step stack: E4M3 elements of this shape, and their scales.
inline Operand alloc_blocks(Step& step, const Shape& shape, ScaleLayout layout, bool transposed) {
  Operand q(step.alloc(shape, DType::f8_e4m3), step.alloc(scale_shape(layout, shape), scale_dtype(layout)), layout);
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
