#include "core/narrow_float.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace moebius {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity(), kNan = std::numeric_limits<float>::quiet_NaN();

// A format by its definition, in double.
struct Definition {
  int exponent_bits, mantissa_bits, max_code;
  double value(int code) const {
    const int bias = (1 << (exponent_bits - 1)) - 1, exponent = code >> mantissa_bits;
    const double fraction = std::ldexp(code & ((1 << mantissa_bits) - 1), -mantissa_bits);
    return exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  }
  // Returns the code of a magnitude: the nearest number, of two the one with the even code, the largest at most.
  int nearest(double x) const {
    int low = 0;
    while (low < max_code && value(low + 1) <= x) ++low;
    if (low == max_code) return low;
    const double below = x - value(low), above = value(low + 1) - x;
    if (below != above) return below < above ? low : low + 1;
    return low % 2 == 0 ? low : low + 1;
  }
};
constexpr Definition kE4M3{4, 3, 0x7e}, kE5M2{5, 2, 0x7b}, kE2M1{2, 1, 7};

// Returns the values of all codes, the middles between neighbours, and the f32 on both sides of each.
std::vector<float> interesting(const Definition& d) {
  std::vector<float> all{0.0f, 0x1p-149f, 0x1p-126f, std::numeric_limits<float>::max(), kInf};
  for (int code = 0; code <= d.max_code; ++code) {
    const double here = d.value(code), next = code < d.max_code ? d.value(code + 1) : 2 * here;
    for (const double x : {here, (here + next) / 2}) {
      const auto f = static_cast<float>(x);
      for (const float y : {f, std::nextafter(f, 0.0f), std::nextafter(f, kInf)}) all.push_back(y);
    }
  }
  return all;
}

template <class Encode>
void expect_exact(const Definition& d, Encode encode, int sign) {
  for (const float x : interesting(d)) {
    EXPECT_EQ(encode(x), d.nearest(x)) << x;
    EXPECT_EQ(encode(-x), d.nearest(x) | sign) << -x;
  }
}

TEST(NarrowFloat, RoundsToTheNearestNumberOrTheEvenOne) {
  expect_exact(
      kE4M3, [](float x) { return to_f8_e4m3(x).bits; }, 0x80);
  expect_exact(
      kE5M2, [](float x) { return to_f8_e5m2(x).bits; }, 0x80);
  expect_exact(
      kE2M1, [](float x) { return to_f4_e2m1(x); }, 8);
}

// A stride through all f32 that meets every exponent with many mantissas.
TEST(NarrowFloat, RoundsAnyNumberToTheNearest) {
  for (uint64_t bits = 0; bits < 0x7f800000u; bits += 100003) {
    const float x = std::bit_cast<float>(static_cast<uint32_t>(bits));
    ASSERT_EQ(to_f8_e4m3(x).bits, kE4M3.nearest(x)) << x;
    ASSERT_EQ(to_f8_e5m2(x).bits, kE5M2.nearest(x)) << x;
    ASSERT_EQ(to_f4_e2m1(x), kE2M1.nearest(x)) << x;
  }
}

TEST(NarrowFloat, EveryCodeRoundTrips) {
  for (int code = 0; code < 256; ++code) {
    const double sign = code & 0x80 ? -1 : 1;
    const auto bits = static_cast<uint8_t>(code);
    if ((code & 0x7f) <= kE4M3.max_code) {
      EXPECT_EQ(to_f32(f8_e4m3{bits}), sign * kE4M3.value(code & 0x7f)) << code;
      EXPECT_EQ(to_f8_e4m3(to_f32(f8_e4m3{bits})).bits, code);
    }
    if ((code & 0x7f) <= kE5M2.max_code) {
      EXPECT_EQ(to_f32(f8_e5m2{bits}), sign * kE5M2.value(code & 0x7f)) << code;
      EXPECT_EQ(to_f8_e5m2(to_f32(f8_e5m2{bits})).bits, code);
    }
    if (code < 255) {
      EXPECT_EQ(to_f32(e8m0{bits}), std::ldexp(1.0, code - 127)) << code;
      EXPECT_EQ(to_e8m0(to_f32(e8m0{bits})).bits, code);
    }
    if (code < 16) {
      EXPECT_EQ(kF4E2m1Values[code], (code & 8 ? -1 : 1) * kE2M1.value(code & 7)) << code;
      EXPECT_EQ(to_f4_e2m1(kF4E2m1Values[code]), code);
    }
  }
  EXPECT_TRUE(std::signbit(to_f32(f8_e4m3{0x80})));
  EXPECT_TRUE(std::signbit(kF4E2m1Values[8]));
}

TEST(NarrowFloat, ConvertsNaNAndInfinity) {
  for (const float x : {kNan, -kNan}) {
    EXPECT_EQ(to_f8_e4m3(x).bits, 0x7f);
    EXPECT_EQ(to_f8_e5m2(x).bits, 0x7f);
    EXPECT_EQ(to_f4_e2m1(x), 7);
    EXPECT_EQ(to_e8m0(x).bits, 0xff);
  }
  for (const int code : {0x7f, 0xff}) {
    EXPECT_TRUE(std::isnan(to_f32(f8_e4m3{static_cast<uint8_t>(code)})));
    EXPECT_TRUE(std::isnan(to_f32(f8_e5m2{static_cast<uint8_t>(code)})));
  }
  EXPECT_EQ(to_f32(f8_e5m2{0x7c}), kInf);
  EXPECT_EQ(to_f32(f8_e5m2{0xfc}), -kInf);
  EXPECT_TRUE(std::isnan(to_f32(e8m0{0xff})));
}

TEST(NarrowFloat, ScalesRoundUp) {
  EXPECT_EQ(to_e8m0(1.0f).bits, 127);
  EXPECT_EQ(to_e8m0(std::nextafter(1.0f, 2.0f)).bits, 128);
  EXPECT_EQ(to_e8m0(std::nextafter(1.0f, 0.0f)).bits, 127);
  EXPECT_EQ(to_e8m0(0.0f).bits, 0);
  EXPECT_EQ(to_e8m0(0x1p-149f).bits, 0);
  EXPECT_EQ(to_e8m0(0x1.8p-127f).bits, 1);
  EXPECT_EQ(to_e8m0(std::numeric_limits<float>::max()).bits, 0xfe);
  EXPECT_EQ(to_e8m0(kInf).bits, 0xfe);
  EXPECT_EQ(to_e8m0(-1.0f).bits, 0xff);
}

}  // namespace
}  // namespace moebius
