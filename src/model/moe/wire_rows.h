// FP8 dispatch (precision.dispatch = "recipe"): rows are sent to experts as f8_e4m3 with a scale for each 128 elements.
// A packed row has the data of a token, then its scales. A dispatcher sees the bytes as a narrower row of the dtype of
// the computation, and does not interpret them.
//
// Experts compute with the quantised values, even on one rank, so that no layout changes the result. Quantising them
// again along a row gives the same values, since the scales are powers of two.
#pragma once

#include "config/policy_spec.h"
#include "model/step.h"

namespace moebius {

class WireRows {
 public:
  // D: the width of a row. Throws Error{usage} if packed rows would be wider. Without precision.dispatch = "recipe", or
  // without a recipe, rows are sent unpacked.
  WireRows(const PrecisionSpec& precision, DType dtype, int64_t D);

  bool is_packed() const { return width_ > 0; }
  int64_t num_bytes() const { return (is_packed() ? width_ : D_) * size_of(dtype_); }  // of a row that is sent
  // Returns packed rows [T, width] on the step stack, or x itself if rows are sent unpacked.
  Tensor pack(Step& step, Tensor x_TD) const;
  // Returns rows [N, D] on the step stack. Rows that did not arrive have undefined values.
  Tensor unpack(Step& step, Tensor rows_NW) const;

 private:
  DType dtype_;
  int64_t D_;
  int64_t width_ = 0;  // elements of dtype_ in a packed row; 0: rows are sent unpacked
};

}  // namespace moebius
