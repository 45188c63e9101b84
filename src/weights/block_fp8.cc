#include "weights/block_fp8.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "core/narrow_float.h"
#include "core/quantized.h"
#include "model/layers/precision_of.h"
#include "ops/quantize/scales.h"

namespace moebius {
namespace {

struct Block {
  int64_t row, end_row, col, end_col;
};

template <class F>
void for_elements(const Block& b, int64_t cols, F fn) {
  for (int64_t r = b.row; r < b.end_row; ++r)
    for (int64_t c = b.col; c < b.end_col; ++c) fn(r * cols + c);
}

// Returns the code of x / scale. Zeros keep their sign.
f8_e4m3 code_of(float x, float scale) { return to_f8_e4m3(scale == 0 ? x : x / scale); }

bool are_products_of(const float* x, const Block& b, int64_t cols, float scale) {
  bool all = true;
  for_elements(b, cols, [&](int64_t i) {
    const float back = to_f32(code_of(x[i], scale)) * scale;
    all = all &&
          (std::bit_cast<uint32_t>(back) == std::bit_cast<uint32_t>(x[i]) || (std::isnan(back) && std::isnan(x[i])));
  });
  return all;
}

float power_of_two(const float* x, const Block& b, int64_t cols) {
  uint32_t largest = 0;
  for_elements(b, cols, [&](int64_t i) { largest = std::max(largest, std::bit_cast<uint32_t>(x[i]) & 0x7fffffffu); });
  return power_of_two_scale(largest, top_exponent(DType::f8_e4m3));
}

// vLLM joins the rows of q, k and v, and of a gate and its up projection. It places the scales of a part by the
// blocks of the parts before it, so only the last part may end within a block.
bool has_whole_blocks(const ParamSpec& spec) {
  const int64_t rows = block_size(ScaleLayout::square_blocks).rows;
  return spec.kind != ParamKind::matrix ||
         std::all_of(spec.parts.begin(), std::prev(spec.parts.end()),
                     [&](const ParamPart& part) { return part.shape[0] % rows == 0; });
}

}  // namespace

Shape block_scales_shape(const Shape& matrix, int64_t block_rows, int64_t block_cols) {
  return {div_ceil(matrix[0], block_rows), div_ceil(matrix[1], block_cols)};
}

BlockFp8 to_block_fp8(const float* x, int64_t rows, int64_t cols, const ReleasedScales& released) {
  const BlockSize plain = block_size(ScaleLayout::square_blocks);
  const int64_t block_rows = released.empty() ? plain.rows : released.block_rows,
                block_cols = released.empty() ? plain.cols : released.block_cols;
  BlockFp8 packed;
  packed.data.resize(rows * cols);
  packed.scales.resize(block_scales_shape({rows, cols}, block_rows, block_cols).numel());
  MOEBIUS_ASSERT(released.empty() || released.scales.size() == packed.scales.size());
  size_t at = 0;
  for (int64_t row = 0; row < rows; row += block_rows) {
    for (int64_t col = 0; col < cols; col += block_cols, ++at) {
      const Block b{row, std::min(rows, row + block_rows), col, std::min(cols, col + block_cols)};
      const bool keeps = !released.empty() && are_products_of(x, b, cols, released.scales[at]);
      const float scale = keeps ? released.scales[at] : power_of_two(x, b, cols);
      for_elements(b, cols, [&](int64_t i) { packed.data[i] = code_of(x[i], scale).bits; });
      packed.scales[at] = scale;
    }
  }
  return packed;
}

std::vector<std::string> block_fp8_matrices(const ModelCatalog& catalog) {
  std::vector<std::string> names;
  for (const ModelCatalog::Entry& entry : catalog.params()) {
    if (!has_whole_blocks(entry.spec)) continue;
    for (const ParamPart& part : entry.spec.parts)
      if (has_quantised_product(entry.spec, part)) names.push_back(part.name);
  }
  return names;
}

}  // namespace moebius
