// The formats in which optimizers store values, besides f32.
//
// A bf16 weight and a remainder of 16 bits are together an f32, its master:
//   bits(master) = (bits(weight) << 16) + remainder   with the remainder as a signed number
// The weight is the bf16 nearest to the master. Halfway between two it is the one that is farther from 0, since
// with rounding to nearest even some weights have 65537 masters, more than 16 bits can encode. Every
// f32 except a NaN is restored with its bits; a NaN is restored as some NaN.
//
// Stochastic rounding to bf16 adds 16 random bits to those that are dropped, and truncates. So a
// number between two neighbours becomes the upper one with a probability of its distance from the
// lower one, and its expectation is the number itself.
//
// The functions are for CPU and GPU.
#pragma once

#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace moebius {

constexpr bool is_nan_bits(uint32_t u) { return (u & 0x7fffffffu) > 0x7f800000u; }

struct WeightAndRemainder {
  bf16 weight;
  uint16_t remainder;
};

constexpr float joined(bf16 weight, uint16_t remainder) {
  const auto low = static_cast<uint32_t>(static_cast<int32_t>(static_cast<int16_t>(remainder)));
  return std::bit_cast<float>((static_cast<uint32_t>(weight.bits) << 16) + low);
}

constexpr WeightAndRemainder split(float master) {
  const uint32_t u = std::bit_cast<uint32_t>(master);
  const bool nan = is_nan_bits(u);
  const uint32_t weight = nan ? (u >> 16) | 0x40u : (u + 0x8000u) >> 16;
  return {.weight = {static_cast<uint16_t>(weight)}, .remainder = static_cast<uint16_t>(nan ? 0 : u)};
}

// draw: 16 random bits. Infinities and NaNs stay what they are.
constexpr bf16 to_bf16_stochastic(float x, uint32_t draw) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  const bool finite = (u & 0x7fffffffu) < 0x7f800000u;
  const uint32_t special = (u >> 16) | (is_nan_bits(u) ? 0x40u : 0u);
  return {static_cast<uint16_t>(finite ? (u + draw) >> 16 : special)};
}

}  // namespace moebius
