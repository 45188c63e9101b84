#include "hub/packed_weights.h"

#include <algorithm>
#include <array>
#include <bit>
#include <limits>

#include "core/error.h"
#include "core/narrow_float.h"

namespace moebius {
namespace {

using nlohmann::json;

bool is_block_size(const json& v) {
  const auto is_size = [](const json& n) { return n.is_number_integer() && n >= 1 && n <= 1 << 20; };
  return v.is_array() && v.size() == 2 && is_size(v[0]) && is_size(v[1]);
}

}  // namespace

WeightPacking read_weight_packing(const json& config, const std::string& who) {
  const auto it = config.find("quantization_config");
  if (it == config.end() || it->is_null()) return {};
  const json method = it->is_object() ? it->value("quant_method", json()) : json();
  if (method == "mxfp4") return {.kind = WeightPacking::Kind::mxfp4};
  MOEBIUS_CHECK(input, method == "fp8",
                "{}: expected weights without quantization_config, or of quant_method \"fp8\" or \"mxfp4\"; got {}; "
                "convert them to bf16 first",
                who, method.dump());
  WeightPacking packing{.kind = WeightPacking::Kind::fp8};
  const json format = it->value("fmt", json("e4m3")), size = it->value("weight_block_size", json());
  MOEBIUS_CHECK(input, format == "e4m3",
                "{}: expected quantization_config.fmt \"e4m3\"; got {}; convert the weights to bf16 first", who,
                format.dump());
  MOEBIUS_CHECK(input, is_block_size(size),
                "{}: expected quantization_config.weight_block_size of two whole numbers, "
                "[128, 128] for instance; got {}; fetch config.json again",
                who, size.dump());
  packing.block_rows = size[0];
  packing.block_cols = size[1];
  return packing;
}

float f8_e4m3_value(uint8_t bits) { return to_f32(f8_e4m3{bits}); }

void unpack_fp8(float* dst, const uint8_t* src, const float* scale, int64_t rows, int64_t cols,
                const WeightPacking& packing) {
  const int64_t scale_cols = (cols + packing.block_cols - 1) / packing.block_cols;
  for (int64_t r = 0; r < rows; ++r) {
    const float* row_scale = scale + r / packing.block_rows * scale_cols;
    for (int64_t begin = 0; begin < cols; begin += packing.block_cols) {
      const int64_t end = std::min(begin + packing.block_cols, cols);
      const float factor = row_scale[begin / packing.block_cols];
      for (int64_t c = begin; c < end; ++c) dst[r * cols + c] = kF8E4m3Values[src[r * cols + c]] * factor;
    }
  }
}

bool unpack_mxfp4(bf16* dst, const uint8_t* blocks, const uint8_t* scales, int64_t first, int64_t n) {
  constexpr float kValues[] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                               -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
  for (int64_t i = first; i < first + n; ++i) {
    const int scale = scales[i / kMxfp4Block];
    if (scale == 255) return false;
    const int bits = i % 2 == 0 ? blocks[i / 2] & 15 : blocks[i / 2] >> 4;
    dst[i - first] = to_bf16(std::ldexp(kValues[bits], scale - 127));
  }
  return true;
}

}  // namespace moebius
