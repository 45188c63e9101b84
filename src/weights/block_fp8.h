// Weights in 8-bit floats with a scale for each block, as DeepSeek releases them: "NAME" in f8_e4m3, and
// "NAME_scale_inv" f32 [ceil(rows / block rows), ceil(cols / block cols)], which multiplies it.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "core/tensor.h"
#include "model/catalog.h"

namespace moebius {

inline constexpr const char* kScaleSuffix = "_scale_inv";

// The scales that a matrix was released with; no blocks: it was not released in this form.
struct ReleasedScales {
  int64_t block_rows = 0, block_cols = 0;
  std::vector<float> scales;
  bool empty() const { return scales.empty(); }
};

Shape block_scales_shape(const Shape& matrix, int64_t block_rows, int64_t block_cols);

struct BlockFp8 {
  std::vector<uint8_t> data;
  std::vector<float> scales;
};
// Converts x [rows, cols] to this form. A block whose numbers are products of a released scale and E4M3 numbers gets
// that scale, and so the bits that were released. Others get powers of two, as the recipe fp8_block has them
// (ops/quantize/quantize.h). Without released scales blocks are 128 x 128.
BlockFp8 to_block_fp8(const float* x, int64_t rows, int64_t cols, const ReleasedScales& released);

// Returns the matrices of a model that are exported in this form if it was not released in it, by canonical name.
// They are those whose products the recipe fp8_block quantises: of projections, dense and shared MLPs, and
// experts. vLLM joins q, k and v, and a gate and up, so these are left out where q, k or the gate has rows beyond
// its whole blocks.
std::vector<std::string> block_fp8_matrices(const ModelCatalog& catalog);

}  // namespace moebius
