// Quantised copies in memory of their own, for tests.
#pragma once

#include "core/narrow_float.h"
#include "ops/cpu/testing.h"
#include "ops/quantize/quantize.h"

namespace moebius::testing {

// Room for a quantised matrix, poisoned: every element and scale is a NaN, or -6.
class QuantisedArray {
 public:
  QuantisedArray(Shape shape, DType element, ScaleLayout layout, bool transposed = false)
      : shape_(shape),
        element_(element),
        layout_(layout),
        transposed_(transposed),
        data_(bytes_of(element, shape.numel()), 0xff),
        scales_(bytes_of(scale_dtype(layout), scale_shape(layout, shape).numel()), 0xff),
        tensor_scale_(static_cast<size_t>(tensor_scale_shape(shape).numel()), NAN) {}

  Operand operand() {
    Operand q({.data = data_.data(), .shape = shape_, .dtype = element_},
              {.data = scales_.data(), .shape = scale_shape(layout_, shape_), .dtype = scale_dtype(layout_)}, layout_);
    q.transposed = transposed_;
    if (layout_ == ScaleLayout::nv_blocks) q.tensor_scale = tensor_of(tensor_scale_.data(), tensor_scale_shape(shape_));
    return q;
  }
  Values values(Stream& s) {
    Array x = Array::poisoned(shape_, DType::f32);
    dequantize(s, {.x = x.tensor(), .q = operand()});
    return x.values();
  }
  const std::vector<uint8_t>& data() const { return data_; }
  const std::vector<uint8_t>& scale_bytes() const { return scales_; }
  float scale(size_t i) const {
    float scale;
    std::memcpy(&scale, scales_.data() + i * sizeof scale, sizeof scale);
    return scale;
  }
  float tensor_scale() const { return tensor_scale_[0]; }
  bool operator==(const QuantisedArray& other) const {
    return data_ == other.data_ && scales_ == other.scales_ &&
           (layout_ != ScaleLayout::nv_blocks || tensor_scale_ == other.tensor_scale_);
  }

 private:
  Shape shape_;
  DType element_;
  ScaleLayout layout_;
  bool transposed_;
  std::vector<uint8_t> data_, scales_;
  std::vector<float> tensor_scale_;
};

inline Values transposed(const Values& x, int64_t rows, int64_t cols) {
  Values t(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) t[j * rows + i] = x[i * cols + j];
  }
  return t;
}

}  // namespace moebius::testing
