// Rows on their way to experts in 8 bits, with precision.dispatch = "recipe": each token is quantised
// to f8_e4m3 with a scale for 128 elements, and its data and scales travel side by side. A dispatcher
// moves the bytes as a narrower row of the dtype of the computation, whose bits nothing looks at.
//
// All uses at the experts read the values that arrive, on one rank too, so that no layout changes them.
// Quantising them again along a row gives the same values, since scales are powers of two.
#pragma once

#include "config/policy_spec.h"
#include "model/step.h"

namespace moebius {

class WireRows {
 public:
  // D: the width of a row. Error{usage} where it would become wider. With another choice, or without a recipe, rows
  // travel as they are.
  WireRows(const PrecisionSpec& precision, DType dtype, int64_t D);

  bool is_packed() const { return width_ > 0; }
  // The bytes of a row that travels.
  int64_t num_bytes() const { return (is_packed() ? width_ : D_) * size_of(dtype_); }
  // [T, D] to [T, width], on the step stack; x itself where rows travel as they are.
  Tensor pack(Step& step, Tensor x_TD) const;
  // Back to [N, D], on the step stack. Rows that did not arrive have any values.
  Tensor unpack(Step& step, Tensor rows_NW) const;

 private:
  DType dtype_;
  int64_t D_;
  int64_t width_ = 0;  // elements of dtype_ of a row that travels; 0: as it is
};

}  // namespace moebius
