// Compares quantised bytes and scales with the published formulas of TransformerEngine, DeepGEMM and
// torchao. The data is tests/golden/data/quantize.safetensors, by tools/quantize_golden.py.
#include <gtest/gtest.h>

#include "io/safetensors.h"
#include "ops/quantize/quantize.h"

namespace moebius {
namespace {

class GoldenQuantize : public ::testing::Test {
 protected:
  template <class T>
  std::vector<T> read(const std::string& name) const {
    const SafetensorsEntry& entry = file_.at(name);
    std::vector<T> values(entry.bytes / sizeof(T));
    file_.read(entry, values.data());
    return values;
  }

  struct Format {
    DType element;
    ScaleLayout layout;
    bool transposed = false, square = false, hadamard = false;
  };

  // Quantises the tensor `input` and compares with NAME.data and NAME.scales, byte by byte.
  void expect_bytes(const std::string& name, const std::string& input, const Format& f) {
    std::vector<float> x = read<float>(input), tensor_scale(1);
    const Shape shape = f.transposed ? Shape{kCols, padded_rows(kRows)} : Shape{kRows, kCols};
    std::vector<uint8_t> data(bytes_of(f.element, shape.numel()));
    std::vector<uint8_t> scales(bytes_of(scale_dtype(f.layout), scale_shape(f.layout, shape).numel()));
    Operand q({.data = data.data(), .shape = shape, .dtype = f.element},
              {.data = scales.data(), .shape = scale_shape(f.layout, shape), .dtype = scale_dtype(f.layout)}, f.layout);
    q.transposed = f.transposed;
    if (f.layout == ScaleLayout::nv_blocks) q.tensor_scale = tensor_of(tensor_scale.data(), {1});
    quantize(s_, {.q = q, .x_RC = tensor_of(x.data(), {kRows, kCols}), .square = f.square, .hadamard = f.hadamard});
    EXPECT_EQ(scales, read<uint8_t>(name + ".scales")) << name;
    EXPECT_EQ(data, read<uint8_t>(name + ".data")) << name;
    if (f.layout != ScaleLayout::nv_blocks) return;
    EXPECT_EQ(tensor_scale, read<float>(name + ".tensor_scale")) << name;
  }

  static constexpr int64_t kRows = 144, kCols = 160;
  SafetensorsFile file_ = SafetensorsFile::open(MOEBIUS_SOURCE_DIR "/tests/golden/data/quantize.safetensors");
  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_};
};

TEST_F(GoldenQuantize, BlocksOfRowsAndColumns) {
  expect_bytes("rows", "x", {DType::f8_e4m3, ScaleLayout::row_blocks});
  expect_bytes("columns", "x", {DType::f8_e4m3, ScaleLayout::row_blocks, /*transposed=*/true});
}

TEST_F(GoldenQuantize, SquareBlocks) { expect_bytes("square", "plain", {DType::f8_e4m3, ScaleLayout::square_blocks}); }

TEST_F(GoldenQuantize, WholeTensors) {
  expect_bytes("tensor_e4m3", "plain", {DType::f8_e4m3, ScaleLayout::per_tensor});
  expect_bytes("tensor_e5m2", "plain", {DType::f8_e5m2, ScaleLayout::per_tensor});
}

TEST_F(GoldenQuantize, Mxfp8) { expect_bytes("mx", "plain", {DType::f8_e4m3, ScaleLayout::mx_blocks}); }

TEST_F(GoldenQuantize, Nvfp4) {
  expect_bytes("nv", "plain", {DType::f4_e2m1, ScaleLayout::nv_blocks});
  expect_bytes("nv_square", "plain", {DType::f4_e2m1, ScaleLayout::nv_blocks, false, /*square=*/true});
  expect_bytes("nv_hadamard", "whole", {DType::f4_e2m1, ScaleLayout::nv_blocks, true, false, /*hadamard=*/true});
}

}  // namespace
}  // namespace moebius
