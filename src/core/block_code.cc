#include "core/block_code.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moebius {

void encode_blocks(BlockCode code, uint8_t* codes, float* scales, const float* x, const uint32_t* draws, int64_t n) {
  MOEBIUS_ASSERT(n % kCodeBlock == 0);
  for (int64_t begin = 0; begin < n; begin += kCodeBlock) {
    float scale = 0;
    bool finite = true;
    for (int64_t i = begin; i < begin + kCodeBlock; ++i) {
      scale = std::max(scale, std::abs(x[i]));
      finite = finite && std::isfinite(x[i]);
    }
    scales[begin / kCodeBlock] = finite ? scale : std::numeric_limits<float>::quiet_NaN();
    for (int64_t i = begin; i < begin + kCodeBlock; ++i)
      codes[i] = finite ? encoded(code, kCodeValues, x[i], scale, draws ? draws[i] : 0x8000u) : 0x7fu;
  }
}

void decode_blocks(BlockCode code, float* x, const uint8_t* codes, const float* scales, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = decoded(code, kCodeValues, codes[i], scales[i / kCodeBlock]);
}

bool has_code_blocks(const Shape& shape) {
  return shape.rank() >= 2 && shape.numel() > 0 && shape[shape.rank() - 1] % kCodeBlock == 0;
}

Shape code_scales_shape(const Shape& shape) {
  MOEBIUS_ASSERT(has_code_blocks(shape));
  const int64_t last = shape[shape.rank() - 1] / kCodeBlock;
  return shape.rank() == 2 ? Shape{shape[0], last} : Shape{shape[0], shape[1], last};
}

}  // namespace moebius
