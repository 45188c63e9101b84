// Quantised copies in memory of their own, for tests.
#pragma once

#include <memory>

#include "core/narrow_float.h"
#include "ops/cpu/testing.h"
#include "ops/elementwise/elementwise.h"
#include "ops/quantize/quantize.h"

namespace moebius::testing {

// Memory for a quantised matrix that every device can use. It is poisoned: every element and
// scale is a NaN, or -6.
class QuantisedArray {
 public:
  QuantisedArray(Shape shape, DType element, ScaleLayout layout, bool transposed = false)
      : shape_(shape),
        element_(element),
        layout_(layout),
        transposed_(transposed),
        data_(bytes_of(element, shape.numel())),
        scales_(bytes_of(scale_dtype(layout), scale_shape(layout, shape).numel())),
        tensor_scale_(layout == ScaleLayout::nv_blocks ? 4 * tensor_scale_shape(shape).numel() : 0) {
    for (const SharedBytes* bytes : {&data_, &scales_, &tensor_scale_}) {
      if (bytes->num_bytes() > 0) std::memset(bytes->data(), 0xff, bytes->num_bytes());
    }
  }

  Operand operand() const {
    Operand q({.data = data_.data(), .shape = shape_, .dtype = element_},
              {.data = scales_.data(), .shape = scale_shape(layout_, shape_), .dtype = scale_dtype(layout_)}, layout_);
    q.transposed = transposed_;
    if (layout_ == ScaleLayout::nv_blocks)
      q.tensor_scale = {.data = tensor_scale_.data(), .shape = tensor_scale_shape(shape_), .dtype = DType::f32};
    return q;
  }
  Values values(Stream& s) const {
    Array x = Array::poisoned(shape_, DType::f32);
    dequantize(s, {.x = x.tensor(), .q = operand()});
    return x.values();
  }
  std::vector<unsigned char> data() const { return copy_of(data_); }
  float scale(size_t i) const {
    scales_.settle();
    float scale;
    std::memcpy(&scale, scales_.data() + i * sizeof scale, sizeof scale);
    return scale;
  }
  bool operator==(const QuantisedArray& other) const {
    return data() == other.data() && copy_of(scales_) == copy_of(other.scales_) &&
           copy_of(tensor_scale_) == copy_of(other.tensor_scale_);
  }

 private:
  static std::vector<unsigned char> copy_of(const SharedBytes& bytes) {
    bytes.settle();
    return {bytes.data(), bytes.data() + bytes.num_bytes()};
  }

  Shape shape_;
  DType element_;
  ScaleLayout layout_;
  bool transposed_;
  SharedBytes data_, scales_, tensor_scale_;
};

// Tensors in memory of the GPU alone, for shapes that are too large to be shared with the host.
class GpuTensors {
 public:
  explicit GpuTensors(Stream& s) : s_(s) {}
  Tensor take(const Shape& shape, DType dtype) {
    buffers_.push_back(std::make_unique<Buffer>(DeviceKind::cuda, bytes_of(dtype, shape.numel())));
    return {.data = buffers_.back()->data(), .shape = shape, .dtype = dtype, .device = DeviceKind::cuda};
  }
  Tensor normal(const Shape& shape, DType dtype) {
    const Tensor t = take(shape, dtype);
    fill_normal(s_, {.x = t, .rng = Rng(7, RngSite::bench, 0, static_cast<uint32_t>(buffers_.size()))});
    return t;
  }
  Tensor of_ints(const std::vector<int32_t>& values) {
    const Tensor t = take({std::ssize(values)}, DType::i32);
    copy_to_device(s_, t.data, values.data(), t.num_bytes());
    return t;
  }
  // An operand in E4M3.
  Operand quantised(const Shape& shape, ScaleLayout layout, bool transposed = false) {
    Operand q(take(shape, DType::f8_e4m3), take(scale_shape(layout, shape), scale_dtype(layout)), layout);
    q.transposed = transposed;
    return q;
  }
  std::vector<unsigned char> bytes(const Tensor& t) {
    std::vector<unsigned char> all(t.num_bytes());
    copy_to_host(s_, all.data(), t.data, t.num_bytes());
    return all;
  }

 private:
  Stream& s_;
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

inline Values transposed(const Values& x, int64_t rows, int64_t cols) {
  Values t(x.size());
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < cols; ++j) t[j * rows + i] = x[i * cols + j];
  }
  return t;
}

}  // namespace moebius::testing
