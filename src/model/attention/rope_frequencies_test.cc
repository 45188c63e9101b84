#include "model/attention/rope_frequencies.h"

#include <gtest/gtest.h>

#include <cmath>

namespace moebius {
namespace {

ModelSpec model(const RopeScaling& scaling) {
  ModelSpec m;
  m.head_dim = 8;
  m.rope_theta = 10000;  // plain frequencies 1, 0.1, 0.01, 0.001
  m.rope_scaling = scaling;
  return m;
}

TEST(RopeFrequencies, WithoutScalingThereIsNoTable) {
  const RopeFrequencies f = rope_frequencies(model({}));
  EXPECT_TRUE(f.values.empty());
  EXPECT_EQ(f.magnitude, 1.0);
  EXPECT_EQ(attention_scale_of_rope(model({})), 1.0);
}

TEST(RopeFrequencies, LinearDividesAll) {
  const RopeFrequencies f = rope_frequencies(model({.type = RopeType::linear, .factor = 4}));
  ASSERT_EQ(f.values.size(), 4u);
  for (int i = 0; i < 4; ++i) EXPECT_DOUBLE_EQ(f.values[i], std::pow(0.1, i) / 4);
  EXPECT_EQ(f.magnitude, 1.0);
}

// In 628.3 positions the four turn 100, 10, 1 and 0.1 times.
TEST(RopeFrequencies, Llama3KeepsHighAndDividesLowFrequencies) {
  const RopeScaling s{
      .type = RopeType::llama3, .factor = 8, .original_positions = 628, .low_freq_factor = 0.5, .high_freq_factor = 4};
  const RopeFrequencies f = rope_frequencies(model(s));
  EXPECT_DOUBLE_EQ(f.values[0], 1);
  EXPECT_DOUBLE_EQ(f.values[1], 0.1);
  const double turns = 6.28 / (2 * M_PI), smooth = (turns - 0.5) / 3.5;
  EXPECT_NEAR(f.values[2], 0.01 * ((1 - smooth) / 8 + smooth), 1e-15);
  EXPECT_DOUBLE_EQ(f.values[3], 0.001 / 8);
  EXPECT_EQ(f.magnitude, 1.0);
}

RopeScaling yarn() {
  return {.type = RopeType::yarn, .factor = 10, .original_positions = 628, .beta_fast = 32, .beta_slow = 1};
}

// A dim turns 100 * 10^(-i) times: 32 at i = 0.495, once at i = 2.
TEST(RopeFrequencies, YarnBlendsFromHighToLowFrequencies) {
  RopeScaling s = yarn();
  s.truncate = false;
  const auto dim = [](double turns) { return 8 * std::log(628 / (turns * 2 * M_PI)) / (2 * std::log(1e4)); };
  const double low = dim(32), high = dim(1), r = (1 - low) / (high - low);
  EXPECT_NEAR(low, 0.495, 1e-3);
  const RopeFrequencies f = rope_frequencies(model(s));
  EXPECT_DOUBLE_EQ(f.values[0], 1);
  EXPECT_NEAR(f.values[1], 0.1 * (1 - r) + 0.01 * r, 1e-15);
  EXPECT_NEAR(f.values[2], 0.001, 1e-15);  // the ramp ends just before it
  EXPECT_NEAR(f.values[3], 0.0001, 1e-15);
  // Ends at whole dims: 0 and 2.
  EXPECT_NEAR(rope_frequencies(model(yarn())).values[1], 0.1 * 0.5 + 0.01 * 0.5, 1e-15);
}

TEST(RopeFrequencies, YarnMagnitudes) {
  const auto magnitude = [](RopeScaling s, auto change) {
    change(s);
    return rope_frequencies(model(s)).magnitude;
  };
  EXPECT_DOUBLE_EQ(magnitude(yarn(), [](RopeScaling& s) { s.factor = 32; }), 0.1 * std::log(32.0) + 1);
  EXPECT_EQ(magnitude(yarn(), [](RopeScaling& s) { s.attention_factor = 0.5; }), 0.5);
  EXPECT_EQ(magnitude(yarn(), [](RopeScaling& s) { s.factor = 0.5; }), 1.0);
  EXPECT_EQ(magnitude(yarn(), [](RopeScaling& s) { s.mscale = s.mscale_all_dim = 0.7; }), 1.0);
  EXPECT_DOUBLE_EQ(magnitude(yarn(), [](RopeScaling& s) { s.mscale = 2, s.mscale_all_dim = 1; }),
                   (0.2 * std::log(10.0) + 1) / (0.1 * std::log(10.0) + 1));
  EXPECT_DOUBLE_EQ(magnitude(yarn(), [](RopeScaling& s) { s.mscale = 2; }), 0.1 * std::log(10.0) + 1);
}

// DeepSeek-V3: factor 40, mscale_all_dim 1.
TEST(RopeFrequencies, LatentAttentionScalesItsScores) {
  RopeScaling s = yarn();
  s.factor = 40;
  s.mscale = s.mscale_all_dim = 1;
  ModelSpec m = model(s);
  EXPECT_EQ(attention_scale_of_rope(m), 1.0);
  m.kv_lora_rank = 512;
  m.qk_rope_head_dim = 8;
  EXPECT_NEAR(std::sqrt(attention_scale_of_rope(m)), 1.3689, 5e-5);
  EXPECT_EQ(rope_frequencies(m).magnitude, 1.0);
  m.rope_scaling.mscale_all_dim = 0;
  EXPECT_EQ(attention_scale_of_rope(m), 1.0);
}

}  // namespace
}  // namespace moebius
