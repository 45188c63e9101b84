// The arithmetic of scales and of elements, the same on every device: quantize.h has the formulas.
// Largest magnitudes are passed as bits: these are ordered as the numbers are, then infinity, then NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "core/narrow_float.h"

namespace moebius {

inline constexpr float kLargestFloat = 0x1.fffffep127f;
inline constexpr float kE2m1Max = 6.0f, kE4m3Max = 448.0f;
inline constexpr uint32_t kNotFinite = 0x7f800000u;  // and above

constexpr float lesser(float a, float b) { return a < b ? a : b; }

// The largest element of a format.
constexpr float largest_element(DType element) {
  if (element == DType::f4_e2m1) return kE2m1Max;
  return element == DType::f8_e5m2 ? 57344.0f : kE4m3Max;
}

// log2(max / 1.75) of the elements of this dtype, which have 8 bits.
constexpr int top_exponent(DType element) { return element == DType::f8_e5m2 ? 15 : 8; }

// The smallest 2^n with m <= 1.75 * 2^top * 2^n, n >= -127; 1 for m = 0, NaN for what is not finite.
constexpr float power_of_two_scale(uint32_t m_bits, int top) {
  if (m_bits == 0) return 1.0f;
  if (m_bits >= kNotFinite) return std::bit_cast<float>(0x7fc00000u);
  const int biased = static_cast<int>(m_bits >> 23) - top + ((m_bits & 0x7fffffu) > 0x600000u ? 1 : 0);
  return std::bit_cast<float>(biased <= 0 ? 1u << 22 : static_cast<uint32_t>(biased) << 23);
}

// nv_blocks: g of a tensor. Non-finite values are handled by the block that they are in.
constexpr float nv_encode_scale(uint32_t m_bits) {
  if (m_bits == 0 || m_bits >= kNotFinite) return 1.0f;
  return lesser(kE4m3Max * kE2m1Max / std::bit_cast<float>(m_bits), kLargestFloat);
}

// nv_blocks: the scale of a block, and what its elements are multiplied with.
constexpr f8_e4m3 nv_block_scale(uint32_t m_bits, float encode) {
  if (m_bits >= kNotFinite) return {0x7f};
  return to_f8_e4m3(lesser(std::bit_cast<float>(m_bits) / kE2m1Max * encode, kLargestFloat));
}
constexpr float nv_inverse(f8_e4m3 scale, float tensor_scale) {
  const float inverse = 1.0f / (narrow_float::f8_e4m3_value(scale.bits) * tensor_scale);
  return inverse < kLargestFloat || inverse != inverse ? inverse : kLargestFloat;
}

// v as a code of f4_e2m1, rounded to one of its neighbours: the upper one where u, in (0, 1), is below
// v's share of the way to it.
constexpr uint8_t draw_f4_e2m1(float v, float u) {
  if (v != v) return to_f4_e2m1(v);
  const uint32_t bits = std::bit_cast<uint32_t>(v);
  const float magnitude = lesser(std::bit_cast<float>(bits & 0x7fffffffu), kE2m1Max);
  // The code of the lower neighbour: 0 or 0.5 below 1, and above it the exponent and one bit of the mantissa.
  const uint32_t cut = (std::bit_cast<uint32_t>(magnitude) - (126u << 23)) >> 22;
  uint32_t low = magnitude < 1 ? (magnitude >= 0.5f ? 1 : 0) : cut;
  if (low < 7) {
    const float below = narrow_float::f4_e2m1_value(low), above = narrow_float::f4_e2m1_value(low + 1);
    if (u * (above - below) < magnitude - below) ++low;
  }
  return static_cast<uint8_t>(low | (bits >> 28 & 8u));
}

}  // namespace moebius
