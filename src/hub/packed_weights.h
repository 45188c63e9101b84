// Converts weights of a few bits with scales, as in quantized checkpoints, to wider floats.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "core/dtype.h"

namespace moebius {

// The packing of weights that config.json's quantization_config describes.
struct WeightPacking {
  enum class Kind : uint8_t { none, fp8, mxfp4 };
  Kind kind = Kind::none;
  int64_t block_rows = 128, block_cols = 128;  // used with fp8
};

// Throws Error{input} that names `who` for an unsupported method.
WeightPacking read_weight_packing(const nlohmann::json& config, const std::string& who);

// Returns the value of a float with 4 exponent bits (bias 7), 3 mantissa bits and no infinity.
// The bit patterns 0x7f and 0xff are NaN (Micikevicius et al., arXiv 2209.05433).
float f8_e4m3_value(uint8_t bits);

// dst[r, c] = value of src[r, c] * scale[r / block_rows, c / block_cols]
// scale is [ceil(rows / block_rows), ceil(cols / block_cols)], so blocks at the edges are partial.
void unpack_fp8(float* dst, const uint8_t* src, const float* scale, int64_t rows, int64_t cols,
                const WeightPacking& packing);

// MXFP4 (OCP Microscaling Formats, version 1.0) stores numbers in blocks of 32, each with a scale
// of 8 exponent bits.
inline constexpr int64_t kMxfp4Block = 32;
// dst[i] = value of number `first` + i * 2^(scale - 127), i < n
// A byte holds two numbers, the first one in its low half. A number has a sign, 2 exponent bits and
// 1 mantissa bit, and so one of these magnitudes:
//   0, .5, 1, 1.5, 2, 3, 4, 6
// blocks and scales begin with the block of number 0.
// Returns false when a scale is 255, which means NaN.
[[nodiscard]] bool unpack_mxfp4(bf16* dst, const uint8_t* blocks, const uint8_t* scales, int64_t first, int64_t n);

}  // namespace moebius
