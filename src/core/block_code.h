// 8-bit codes with an f32 scale for each block of 256 elements. Optimizers keep their moments in this format.
//
//   value = scale * code value        scale: the largest magnitude of the block, f32
//
// The codes are those of dynamic tree quantization (Dettmers, arXiv 1511.04561, and for optimizers
// arXiv 2110.02861). The first bit that is set selects the decade, and the bits after it are a linear
// fraction inside the decade:
//
//   code value(k) = 10^(i - I) * (0.1 + 0.9 (j + 1) / 2^i),   k = 2^i + j,  0 <= j < 2^i;   value(0) = 0
//
// A code without a sign has eight bits of k, I = 7, and values from 1e-7 to 1. A code with a sign
// has seven bits of k below the sign, I = 6, and magnitudes from 1e-6 to 1. So the largest magnitude
// of a block is exact. Blocks are counted along the elements of a global tensor, whose last dim is
// a multiple of 256: no row has a part of a block.
//
// The functions are for CPU and GPU.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/tensor.h"

namespace moebius {

inline constexpr int64_t kCodeBlock = 256;  // elements of a block

enum class BlockCode : uint8_t { with_sign, without_sign };

// The values of the codes without their sign, in ascending order.
struct CodeValues {
  float with_sign[128] = {}, without_sign[256] = {};
};

constexpr CodeValues code_values() {
  CodeValues values;
  const auto fill = [](float* to, int bits) {
    double decade = 1;
    for (int i = bits - 1; i >= 0; --i, decade /= 10)
      for (int j = 0; j < 1 << i; ++j) to[(1 << i) + j] = static_cast<float>(decade * (0.1 + 0.9 * (j + 1) / (1 << i)));
  };
  fill(values.with_sign, 7);
  fill(values.without_sign, 8);
  return values;
}
inline constexpr CodeValues kCodeValues = code_values();

// Returns the largest k with values[k] <= x, for x from 0 to 1. num: the number of values, 128 or 256.
constexpr int code_below(const float* values, int num, float x) {
  int k = 0;
  for (int step = num / 2; step > 0; step /= 2)
    if (values[k + step] <= x) k += step;
  return k;
}

// Rounds x, from 0 to 1, to one of its two neighbouring codes. draw has 16 random bits: they select the upper
// neighbour with the probability (x - lower) / (upper - lower). A draw of 0x8000 rounds to nearest.
// With keeps_positive a positive x never becomes 0, since AdamW divides by the root of the second moment.
constexpr uint8_t code_of(const float* values, int num, float x, uint32_t draw, bool keeps_positive) {
  const int k = code_below(values, num, x);
  if (k == num - 1) return static_cast<uint8_t>(k);
  if (k == 0 && keeps_positive) return x > 0 ? 1 : 0;
  const float low = values[k], share = (x - low) / (values[k + 1] - low);
  return static_cast<uint8_t>(k + (share * 65536.0f > static_cast<float>(draw) ? 1 : 0));
}

constexpr uint8_t encoded(BlockCode code, const CodeValues& values, float x, float scale, uint32_t draw) {
  if (!(scale > 0)) return 0;
  const bool negative = x < 0;
  const float magnitude = (negative ? -x : x) / scale;
  if (code == BlockCode::without_sign) return code_of(values.without_sign, 256, magnitude, draw, true);
  const uint8_t k = code_of(values.with_sign, 128, magnitude, draw, false);
  return static_cast<uint8_t>(k | (negative && k > 0 ? 0x80u : 0u));  // zero has one code
}

constexpr float decoded(BlockCode code, const CodeValues& values, uint8_t bits, float scale) {
  if (code == BlockCode::without_sign) return values.without_sign[bits] * scale;
  const float magnitude = values.with_sign[bits & 0x7fu] * scale;
  return (bits & 0x80u) != 0 ? -magnitude : magnitude;
}

// Encode and decode n elements on the CPU, in n / kCodeBlock blocks. REQUIRES: kCodeBlock divides n.
// draws: the low 16 bits of [n] random words; null rounds to nearest. A block with an infinity or a NaN gets the
// scale NaN, so that all of its values decode to NaN.
void encode_blocks(BlockCode code, uint8_t* codes, float* scales, const float* x, const uint32_t* draws, int64_t n);
void decode_blocks(BlockCode code, float* x, const uint8_t* codes, const float* scales, int64_t n);

// Returns whether a global tensor of this shape is kept in 8-bit blocks. Vectors and narrow matrices, which
// have few of all elements, stay in f32.
bool has_code_blocks(const Shape& shape);
// Returns the shape of the scales, [R, C / 256] for codes [R, C].
Shape code_scales_shape(const Shape& shape);

}  // namespace moebius
