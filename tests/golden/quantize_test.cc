// Compares quantised bytes and scales with the published formulas of TransformerEngine, DeepSeek, torchao
// and NVIDIA, on random numbers and on matrices at the borders of formats. The data is
// tests/golden/data/quantize.safetensors, by tools/quantize_golden.py.
#include <gtest/gtest.h>

#include "io/safetensors.h"
#include "ops/quantize/quantize.h"
#include "weights/block_fp8.h"

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

  // Shape of a tensor of the file.
  Shape shape_of(const std::string& name) const {
    const std::vector<int64_t>& dims = file_.at(name).shape;
    if (dims.size() == 1) return {dims[0]};
    return dims.size() == 2 ? Shape{dims[0], dims[1]} : Shape{dims[0], dims[1], dims[2]};
  }

  // Shape of q.data: of the transpose of one matrix, rows are padded.
  static Shape data_shape(const Shape& x, bool transposed) {
    if (!transposed) return x;
    return x.rank() == 2 ? Shape{x[1], padded_rows(x[0])} : Shape{x[0], x[2], x[1]};
  }

  // Quantises the tensor `input` and compares with NAME.data and NAME.scales, byte by byte.
  void expect_bytes(const std::string& name, const std::string& input, const Format& f) {
    const Shape x_shape = shape_of(input), shape = data_shape(x_shape, f.transposed);
    std::vector<float> x = read<float>(input), tensor_scale(static_cast<size_t>(tensor_scale_shape(shape).numel()));
    std::vector<uint8_t> data(bytes_of(f.element, shape.numel()));
    std::vector<uint8_t> scales(bytes_of(scale_dtype(f.layout), scale_shape(f.layout, shape).numel()));
    Operand q({.data = data.data(), .shape = shape, .dtype = f.element},
              {.data = scales.data(), .shape = scale_shape(f.layout, shape), .dtype = scale_dtype(f.layout)}, f.layout);
    q.transposed = f.transposed;
    if (f.layout == ScaleLayout::nv_blocks) q.tensor_scale = tensor_of(tensor_scale.data(), tensor_scale_shape(shape));
    quantize(s_, {.q = q, .x_RC = tensor_of(x.data(), x_shape), .square = f.square, .hadamard = f.hadamard});
    EXPECT_EQ(scales, read<uint8_t>(name + ".scales")) << name;
    EXPECT_EQ(data, read<uint8_t>(name + ".data")) << name;
    if (f.layout != ScaleLayout::nv_blocks) return;
    EXPECT_EQ(tensor_scale, read<float>(name + ".tensor_scale")) << name;
  }

  // Compares NAME for the input `plain`, and cases_NAME for `cases`.
  void expect_bytes_and_cases(const std::string& name, const Format& f) {
    expect_bytes(name, "plain", f);
    expect_bytes("cases_" + name, "cases", f);
  }

  // Dequantises NAME.data to a vector of T.
  template <class T>
  std::vector<T> values(const std::string& name, DType dtype) {
    const Shape shape = shape_of(name + ".data");
    std::vector<uint8_t> data = read<uint8_t>(name + ".data");
    std::vector<float> scales = read<float>(name + ".scales");
    std::vector<T> x(data.size());
    const Operand q({.data = data.data(), .shape = shape, .dtype = DType::f8_e4m3},
                    tensor_of(scales.data(), shape_of(name + ".scales")), ScaleLayout::square_blocks);
    dequantize(s_, {.x = {.data = x.data(), .shape = shape, .dtype = dtype}, .q = q});
    return x;
  }

  SafetensorsFile file_ = SafetensorsFile::open(MOEBIUS_SOURCE_DIR "/tests/golden/data/quantize.safetensors");
  ThreadPool pool_{2};
  Stream s_{DeviceKind::cpu, pool_};
};

TEST_F(GoldenQuantize, BlocksOfRowsAndColumns) {
  for (const auto& [name, input] : {std::pair{"", "x"}, {"cases_", "cases"}}) {
    expect_bytes(std::string(name) + "rows", input, {DType::f8_e4m3, ScaleLayout::row_blocks});
    expect_bytes(std::string(name) + "columns", input, {DType::f8_e4m3, ScaleLayout::row_blocks, /*transposed=*/true});
  }
}

TEST_F(GoldenQuantize, SquareBlocks) { expect_bytes_and_cases("square", {DType::f8_e4m3, ScaleLayout::square_blocks}); }

TEST_F(GoldenQuantize, WholeTensors) {
  expect_bytes_and_cases("tensor_e4m3", {DType::f8_e4m3, ScaleLayout::per_tensor});
  expect_bytes_and_cases("tensor_e5m2", {DType::f8_e5m2, ScaleLayout::per_tensor});
}

TEST_F(GoldenQuantize, Mxfp8) { expect_bytes_and_cases("mx", {DType::f8_e4m3, ScaleLayout::mx_blocks}); }

TEST_F(GoldenQuantize, Nvfp4) {
  expect_bytes_and_cases("nv", {DType::f4_e2m1, ScaleLayout::nv_blocks});
  expect_bytes_and_cases("nv_square", {DType::f4_e2m1, ScaleLayout::nv_blocks, false, /*square=*/true});
  const Format hadamard{DType::f4_e2m1, ScaleLayout::nv_blocks, true, false, /*hadamard=*/true};
  expect_bytes("nv_hadamard", "whole", hadamard);
  expect_bytes("cases_nv_hadamard", "whole_cases", hadamard);
}

// Weights as DeepSeek-V3 releases them: they are converted to the same bf16 numbers, and packed to the same
// bytes again.
TEST_F(GoldenQuantize, ReleasedWeights) {
  for (const std::string name : {"weights", "cases_weights"}) {
    EXPECT_EQ(values<uint16_t>(name, DType::bf16), read<uint16_t>(name + ".bf16")) << name;

    const std::vector<float> x = values<float>(name, DType::f32), scales = read<float>(name + ".scales");
    const Shape shape = shape_of(name + ".data");
    const int64_t rows = shape[shape.rank() - 2], cols = shape[shape.rank() - 1];
    const int64_t matrices = shape.numel() / (rows * cols), blocks = std::ssize(scales) / matrices;
    BlockFp8 packed;
    for (int64_t e = 0; e < matrices; ++e) {
      const ReleasedScales released{128, 128, {&scales[e * blocks], &scales[e * blocks] + blocks}};
      const BlockFp8 one = to_block_fp8(&x[e * rows * cols], rows, cols, released);
      packed.data.insert(packed.data.end(), one.data.begin(), one.data.end());
      packed.scales.insert(packed.scales.end(), one.scales.begin(), one.scales.end());
    }
    EXPECT_EQ(packed.data, read<uint8_t>(name + ".data")) << name;
    EXPECT_EQ(packed.scales, scales) << name;
  }
}

}  // namespace
}  // namespace moebius
