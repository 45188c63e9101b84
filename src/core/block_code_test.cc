#include "core/block_code.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/rng.h"

namespace moebius {
namespace {

// Defines the value of a code in decimal: zeros before the first set bit are decades.
double value_of(int k, int bits) {
  if (k == 0) return 0;
  const int i = static_cast<int>(std::log2(k));
  return std::pow(10.0, i - (bits - 1)) * (0.1 + 0.9 * (k - (1 << i) + 1) / (1 << i));
}

TEST(BlockCodes, HaveTheValuesOfTheirDefinition) {
  for (int k = 0; k < 256; ++k) EXPECT_FLOAT_EQ(kCodeValues.without_sign[k], static_cast<float>(value_of(k, 8))) << k;
  for (int k = 0; k < 128; ++k) EXPECT_FLOAT_EQ(kCodeValues.with_sign[k], static_cast<float>(value_of(k, 7))) << k;
  for (int k = 1; k < 256; ++k) EXPECT_LT(kCodeValues.without_sign[k - 1], kCodeValues.without_sign[k]);
  EXPECT_EQ(kCodeValues.without_sign[255], 1.0f);
  EXPECT_EQ(kCodeValues.with_sign[127], 1.0f);
}

TEST(BlockCodes, EncodingADecodedCodeReturnsTheCode) {
  for (const float scale : {1.0f, 0.75f, 3e-12f, 1e30f}) {
    for (int k = 0; k < 256; ++k) {
      const auto bits = static_cast<uint8_t>(k);
      const float x = decoded(BlockCode::without_sign, kCodeValues, bits, scale);
      EXPECT_EQ(encoded(BlockCode::without_sign, kCodeValues, x, scale, 0x8000u), bits) << scale;
      if (bits == 0x80u) continue;  // not a code
      const float y = decoded(BlockCode::with_sign, kCodeValues, bits, scale);
      EXPECT_EQ(encoded(BlockCode::with_sign, kCodeValues, y, scale, 0x8000u), bits) << scale;
    }
  }
}

// Any draw gives one of the two neighbours, 0x8000 the nearer one.
TEST(BlockCodes, RoundToANeighbour) {
  const Rng rng(3, RngSite::bench);
  for (uint64_t i = 0; i < 20000; ++i) {
    const float x = std::pow(10.0f, -8 * rng.uniform(2 * i)) * (i % 2 ? -1.0f : 1.0f);
    const auto bits = encoded(BlockCode::with_sign, kCodeValues, x, 1, rng.bits(2 * i + 1)[0] & 0xffffu);
    const float got = decoded(BlockCode::with_sign, kCodeValues, bits, 1);
    const float nearest =
        decoded(BlockCode::with_sign, kCodeValues, encoded(BlockCode::with_sign, kCodeValues, x, 1, 0x8000u), 1);
    const int k = code_below(kCodeValues.with_sign, 128, std::abs(x));
    ASSERT_TRUE((bits & 0x7f) == k || (bits & 0x7f) == k + 1) << x;
    EXPECT_LE(std::abs(nearest - x), std::abs(got - x)) << x;
    if (got != 0) {
      EXPECT_EQ(std::signbit(got), std::signbit(x));
    }
  }
}

// encode_blocks finds codes with a table, encoded() with a search. Each value of a code, its neighbours among the
// floats, borders of binades and random numbers have the same codes from both, whatever the draw.
TEST(BlockCodes, BlocksHaveTheCodesOfTheSearch) {
  std::vector<float> values{0, 1e-30f, 9e-8f, 5e-7f};
  for (const float value : kCodeValues.without_sign) values.push_back(value);
  for (const float value : kCodeValues.with_sign) values.push_back(value);
  for (float power = 1; power > 1e-8f; power /= 2)
    for (int i = 128; i < 256; ++i) values.push_back(power * static_cast<float>(i) / 256);
  for (size_t i = 4, num = values.size(); i < num; ++i) {
    values.push_back(std::nextafter(values[i], 0.0f));
    values.push_back(std::min(std::nextafter(values[i], 2.0f), 1.0f));
  }
  const Rng rng(11, RngSite::bench);
  while (values.size() % (kCodeBlock - 1) != 0) values.push_back(rng.uniform(values.size()));
  for (const float scale : {1.0f, 3e-12f}) {
    for (const BlockCode code : {BlockCode::with_sign, BlockCode::without_sign}) {
      for (size_t begin = 0; begin < values.size(); begin += kCodeBlock - 1) {
        std::vector<float> x(kCodeBlock, scale);  // the last element is the largest
        std::vector<uint32_t> draws(kCodeBlock);
        for (size_t i = 0; i + 1 < x.size(); ++i) {
          x[i] = values[begin + i] * scale * (code == BlockCode::with_sign && i % 2 == 1 ? -1.0f : 1.0f);
          draws[i] = rng.bits(begin + i)[1] & 0xffffu;
        }
        std::vector<uint8_t> drawn(kCodeBlock), nearest(kCodeBlock);
        float got_scale = 0;
        encode_blocks(code, drawn.data(), &got_scale, x.data(), draws.data(), kCodeBlock);
        encode_blocks(code, nearest.data(), &got_scale, x.data(), nullptr, kCodeBlock);
        ASSERT_EQ(got_scale, scale);
        for (size_t i = 0; i < x.size(); ++i) {
          ASSERT_EQ(drawn[i], encoded(code, kCodeValues, x[i], scale, draws[i])) << x[i] / scale;
          ASSERT_EQ(nearest[i], encoded(code, kCodeValues, x[i], scale, 0x8000u)) << x[i] / scale;
        }
      }
    }
  }
}

TEST(BlockCodes, ZeroHasOneCode) {
  for (const float x : {-0.0f, 0.0f, -1e-9f, 1e-9f})
    EXPECT_EQ(encoded(BlockCode::with_sign, kCodeValues, x, 1, 0x8000u), 0) << x;
}

// The mean of n draws has a deviation of at most half a step / sqrt(n); five of them are allowed.
TEST(BlockCodes, StochasticRoundingKeepsTheMean) {
  const Rng rng(7, RngSite::bench);
  for (const float x : {0.9012f, 0.2345f, 0.0123f, 4e-5f}) {
    constexpr int kNum = 40000;
    double sum = 0;
    for (uint64_t i = 0; i < kNum; ++i) {
      const auto bits = encoded(BlockCode::without_sign, kCodeValues, x, 1, rng.bits(i)[0] & 0xffffu);
      sum += decoded(BlockCode::without_sign, kCodeValues, bits, 1);
    }
    const int k = code_below(kCodeValues.without_sign, 256, x);
    const double step = kCodeValues.without_sign[k + 1] - kCodeValues.without_sign[k];
    EXPECT_NEAR(sum / kNum, x, 5 * 0.5 * step / std::sqrt(kNum));
  }
}

TEST(BlockCodes, ASecondMomentAboveZeroStaysAboveZero) {
  for (const float x : {1e-30f, 1e-12f, 0.9e-7f})
    for (const uint32_t draw : {0u, 0x8000u, 0xffffu})
      EXPECT_EQ(encoded(BlockCode::without_sign, kCodeValues, x, 1, draw), 1) << x;
  EXPECT_EQ(encoded(BlockCode::without_sign, kCodeValues, 0, 1, 0), 0);
  EXPECT_EQ(encoded(BlockCode::without_sign, kCodeValues, 0, 0, 0), 0);
}

TEST(BlockCodes, ScaleOfABlockIsItsLargestMagnitude) {
  std::vector<float> x(2 * kCodeBlock), back(x.size());
  const Rng rng(1, RngSite::bench);
  for (size_t i = 0; i < x.size(); ++i) x[i] = rng.normal(i) * (i < 256 ? 1e-3f : 50.0f);
  x[300] = -400;
  std::vector<uint8_t> codes(x.size());
  std::vector<float> scales(2);
  encode_blocks(BlockCode::with_sign, codes.data(), scales.data(), x.data(), nullptr, std::ssize(x));
  decode_blocks(BlockCode::with_sign, back.data(), codes.data(), scales.data(), std::ssize(x));
  EXPECT_EQ(scales[1], 400);
  EXPECT_EQ(back[300], -400);
  for (size_t i = 0; i < x.size(); ++i)  // half of the widest step, 0.9 / 64 of the scale
    EXPECT_NEAR(back[i], x[i], 0.0071f * scales[i / 256]);
  x[3] = std::numeric_limits<float>::infinity();
  encode_blocks(BlockCode::with_sign, codes.data(), scales.data(), x.data(), nullptr, std::ssize(x));
  decode_blocks(BlockCode::with_sign, back.data(), codes.data(), scales.data(), std::ssize(x));
  EXPECT_TRUE(std::isnan(back[0]));
  EXPECT_EQ(back[300], -400);
}

TEST(BlockCodes, AreForMatricesWithWholeBlocksPerRow) {
  EXPECT_TRUE(has_code_blocks({3, 512}));
  EXPECT_FALSE(has_code_blocks({3, 384}));
  EXPECT_FALSE(has_code_blocks({512}));
  EXPECT_EQ(code_scales_shape({3, 512}), (Shape{3, 2}));
  EXPECT_EQ(code_scales_shape({4, 3, 512}), (Shape{4, 3, 2}));
}

}  // namespace
}  // namespace moebius
