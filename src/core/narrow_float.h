// Floating-point formats of 8 and 4 bits, and their conversions from and to f32.
//
//   f8_e4m3  bias 7, largest 448, no infinity, NaN 0x7f and 0xff      OCP OFP8 1.0 ("fn")
//   f8_e5m2  bias 15, largest 57344, infinity and NaN as in IEEE 754  OCP OFP8 1.0
//   f4_e2m1  0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives           OCP Microscaling 1.0
//   e8m0     powers of two, 2^(bits - 127), NaN 0xff                  OCP Microscaling 1.0
//
// Conversions from f32 round to nearest even and saturate: a larger magnitude than the largest finite number,
// also an infinity, becomes that number with its sign. Zero keeps its sign. A NaN becomes 0x7f; in f4_e2m1, which
// has no NaN, it becomes 6. These are the rules of PTX's cvt.rn.satfinite. A conversion to e8m0 rounds up, as
// cvt.rp.satfinite does.
#pragma once

#include <array>
#include <bit>
#include <cstdint>

#include "core/dtype.h"

namespace moebius {

struct f8_e4m3 {
  uint8_t bits;
};
struct f8_e5m2 {
  uint8_t bits;
};
struct e8m0 {
  uint8_t bits;
};
// Two elements: the first in the low half.
struct f4_e2m1_pair {
  uint8_t bits;
};

template <>
inline constexpr DType dtype_of<f8_e4m3> = DType::f8_e4m3;
template <>
inline constexpr DType dtype_of<f8_e5m2> = DType::f8_e5m2;
template <>
inline constexpr DType dtype_of<e8m0> = DType::e8m0;
template <>
inline constexpr DType dtype_of<f4_e2m1_pair> = DType::f4_e2m1;

namespace narrow_float {

// A format of a sign, exponent_bits and mantissa_bits; max_code is the code of its largest number.
template <int exponent_bits, int mantissa_bits, int max_code>
struct Format {
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kDropped = 23 - mantissa_bits;  // bits of an f32's mantissa that are rounded away
  static constexpr int kMaxCode = max_code;
  // Adding kMagic to a number below the smallest normal number rounds it to a multiple of the smallest subnormal
  // number: the last bit of the sum's mantissa has that value.
  static constexpr uint32_t kMagic = static_cast<uint32_t>(127 - kBias + 1 + kDropped) << 23;
  static constexpr uint32_t kSmallestNormal = static_cast<uint32_t>(127 - kBias + 1) << 23;

  // Returns the code of |x|, rounded to nearest even and saturated. REQUIRES: x is not a NaN. It has no branches, so
  // that loops over it vectorise.
  static constexpr uint32_t magnitude(uint32_t x) {
    const uint32_t tiny = std::bit_cast<uint32_t>(std::bit_cast<float>(x) + std::bit_cast<float>(kMagic)) - kMagic;
    const uint32_t rebased = x - (static_cast<uint32_t>(127 - kBias) << 23);
    const uint32_t rounded = (rebased + (1u << (kDropped - 1)) - 1 + ((rebased >> kDropped) & 1u)) >> kDropped;
    const uint32_t code = x < kSmallestNormal ? tiny : rounded;
    return code > kMaxCode ? kMaxCode : code;
  }

  // Returns the value of a code without its sign. REQUIRES: the code is not a NaN or an infinity.
  static constexpr float value(uint32_t code) {
    const uint32_t exponent = code >> mantissa_bits, mantissa = code & ((1u << mantissa_bits) - 1);
    if (exponent == 0) return static_cast<float>(mantissa) / static_cast<float>(1 << (kBias - 1 + mantissa_bits));
    return std::bit_cast<float>((exponent + 127 - kBias) << 23 | mantissa << kDropped);
  }
};
using E4M3 = Format<4, 3, 0x7e>;
using E5M2 = Format<5, 2, 0x7b>;
using E2M1 = Format<2, 1, 0x7>;

inline constexpr uint32_t kInfinity = 0x7f800000u;

template <class F>
constexpr uint8_t to_8_bits(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffffu;
  const uint32_t code = F::magnitude(magnitude < kInfinity ? magnitude : kInfinity) | (u >> 24 & 0x80u);
  return static_cast<uint8_t>(magnitude > kInfinity ? 0x7fu : code);
}

constexpr float signed_value(float magnitude, bool negative) { return negative ? -magnitude : magnitude; }

constexpr float f8_e4m3_value(uint32_t bits) {
  if ((bits & 0x7f) == 0x7f) return std::bit_cast<float>(0x7fc00000u);
  return signed_value(E4M3::value(bits & 0x7f), bits & 0x80);
}

constexpr float f8_e5m2_value(uint32_t bits) {
  const uint32_t code = bits & 0x7f;
  if (code > 0x7c) return std::bit_cast<float>(0x7fc00000u);
  return signed_value(code == 0x7c ? std::bit_cast<float>(kInfinity) : E5M2::value(code), bits & 0x80);
}

constexpr float f4_e2m1_value(uint32_t bits) { return signed_value(E2M1::value(bits & 7), bits & 8); }

constexpr float e8m0_value(uint32_t bits) {
  if (bits == 0xff) return std::bit_cast<float>(0x7fc00000u);
  return std::bit_cast<float>(bits == 0 ? 1u << 22 : bits << 23);
}

template <size_t n, class Value>
constexpr std::array<float, n> table_of(Value value) {
  std::array<float, n> values{};
  for (uint32_t bits = 0; bits < n; ++bits) values[bits] = value(bits);
  return values;
}

}  // namespace narrow_float

// The values of all codes.
inline constexpr std::array<float, 256> kF8E4m3Values = narrow_float::table_of<256>(narrow_float::f8_e4m3_value);
inline constexpr std::array<float, 256> kF8E5m2Values = narrow_float::table_of<256>(narrow_float::f8_e5m2_value);
inline constexpr std::array<float, 16> kF4E2m1Values = narrow_float::table_of<16>(narrow_float::f4_e2m1_value);
inline constexpr std::array<float, 256> kE8m0Values = narrow_float::table_of<256>(narrow_float::e8m0_value);

inline float to_f32(f8_e4m3 x) { return kF8E4m3Values[x.bits]; }
inline float to_f32(f8_e5m2 x) { return kF8E5m2Values[x.bits]; }
inline float to_f32(e8m0 x) { return kE8m0Values[x.bits]; }

constexpr f8_e4m3 to_f8_e4m3(float x) { return {narrow_float::to_8_bits<narrow_float::E4M3>(x)}; }
constexpr f8_e5m2 to_f8_e5m2(float x) { return {narrow_float::to_8_bits<narrow_float::E5M2>(x)}; }

// Returns the code in the low four bits.
constexpr uint8_t to_f4_e2m1(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), magnitude = u & 0x7fffffffu;
  const uint32_t code =
      narrow_float::E2M1::magnitude(magnitude < narrow_float::kInfinity ? magnitude : narrow_float::kInfinity) |
      (u >> 28 & 8u);
  return static_cast<uint8_t>(magnitude > narrow_float::kInfinity ? 7u : code);
}

// Returns the smallest power of two that is at least x, within [2^-127, 2^127]. NaNs and negative numbers give NaN.
constexpr e8m0 to_e8m0(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x);
  if (u > 0x80000000u || (u & 0x7fffffffu) > narrow_float::kInfinity) return {0xff};
  const uint32_t magnitude = u & 0x7fffffffu;
  if (magnitude <= 1u << 22) return {0};
  const uint32_t up = (magnitude >> 23) + ((magnitude & 0x7fffffu) != 0 ? 1u : 0u);
  return {static_cast<uint8_t>(up < 0xfe ? up : 0xfe)};
}

}  // namespace moebius
