#include "hub/packed_weights.h"

#include <cmath>

#include "io/testing.h"

namespace moebius {
namespace {

using nlohmann::json;

TEST(PackedWeights, EightBitFloats) {
  EXPECT_EQ(f8_e4m3_value(0x00), 0.0f);
  EXPECT_TRUE(std::signbit(f8_e4m3_value(0x80)));
  EXPECT_EQ(f8_e4m3_value(0x01), 0x1p-9f);  // the smallest
  EXPECT_EQ(f8_e4m3_value(0x07), 7 * 0x1p-9f);
  EXPECT_EQ(f8_e4m3_value(0x08), 0x1p-6f);  // the smallest normal value
  EXPECT_EQ(f8_e4m3_value(0x38), 1.0f);
  EXPECT_EQ(f8_e4m3_value(0xbc), -1.5f);
  EXPECT_EQ(f8_e4m3_value(0x7e), 448.0f);  // the largest
  EXPECT_TRUE(std::isnan(f8_e4m3_value(0x7f)));
  EXPECT_TRUE(std::isnan(f8_e4m3_value(0xff)));
  for (int bits = 1; bits < 0x7f; ++bits) EXPECT_GT(f8_e4m3_value(bits), f8_e4m3_value(bits - 1)) << bits;
}

TEST(PackedWeights, BlocksAtTheEdgesArePartial) {
  const WeightPacking packing{.kind = WeightPacking::Kind::fp8, .block_rows = 2, .block_cols = 3};
  const std::vector<uint8_t> ones(3 * 4, 0x38);
  const float scale[] = {2, 3, 5, 7};
  std::vector<float> got(12);
  unpack_fp8(got.data(), ones.data(), scale, 3, 4, packing);
  EXPECT_EQ(got, (std::vector<float>{2, 2, 2, 3, 2, 2, 2, 3, 5, 5, 5, 7}));
}

TEST(PackedWeights, FourBitBlocks) {
  // Two blocks hold the numbers 0, 1, 2, ... 15 twice, the low half of a byte first.
  std::vector<uint8_t> blocks;
  for (int i = 0; i < 32; ++i) blocks.push_back(static_cast<uint8_t>((2 * i + 1) % 16 << 4 | 2 * i % 16));
  const uint8_t scales[] = {127, 124};
  std::vector<bf16> got(64);
  ASSERT_TRUE(unpack_mxfp4(got.data(), blocks.data(), scales, 0, 64));
  const float values[] = {0, .5f, 1, 1.5f, 2, 3, 4, 6};
  for (int i = 0; i < 64; ++i) {
    const float want = values[i % 8] * (i % 16 < 8 ? 1 : -1) * (i < 32 ? 1.0f : 0.125f);
    EXPECT_EQ(to_f32(got[i]), want) << i;
    EXPECT_EQ(std::signbit(to_f32(got[i])), i % 16 >= 8) << i;
  }
  bf16 few[3];
  ASSERT_TRUE(unpack_mxfp4(few, blocks.data(), scales, 31, 3));
  EXPECT_EQ(to_f32(few[0]), -6.0f);
  EXPECT_EQ(to_f32(few[2]), 0.5f * 0.125f);
}

TEST(PackedWeights, FourBitScalesAreExponents) {
  const std::vector<uint8_t> sixes(16, 0x77), halves(16, 0x11);
  bf16 x;
  for (const auto& [scale, want] : {std::pair<uint8_t, float>{0, 0x3p-126f}, {127, 6.0f}, {251, 0x3p125f}}) {
    ASSERT_TRUE(unpack_mxfp4(&x, sixes.data(), &scale, 5, 1));
    EXPECT_EQ(to_f32(x), want);
  }
  uint8_t scale = 0;
  ASSERT_TRUE(unpack_mxfp4(&x, halves.data(), &scale, 0, 1));
  EXPECT_EQ(to_f32(x), 0x1p-128f);  // the smallest, which bf16 can hold
  scale = 255;
  EXPECT_FALSE(unpack_mxfp4(&x, sixes.data(), &scale, 0, 1));
}

TEST(PackedWeights, ReadsTheConfig) {
  const auto read = [](const json& quantization) {
    return read_weight_packing({{"quantization_config", quantization}}, "config.json");
  };
  EXPECT_EQ(read_weight_packing(json::object(), "c").kind, WeightPacking::Kind::none);
  EXPECT_EQ(read(nullptr).kind, WeightPacking::Kind::none);
  EXPECT_EQ(read({{"quant_method", "mxfp4"}}).kind, WeightPacking::Kind::mxfp4);
  const WeightPacking fp8 = read({{"quant_method", "fp8"}, {"fmt", "e4m3"}, {"weight_block_size", {64, 128}}});
  EXPECT_EQ(fp8.kind, WeightPacking::Kind::fp8);
  EXPECT_EQ(fp8.block_rows, 64);
  EXPECT_EQ(fp8.block_cols, 128);
  const auto refuse = [&](const json& quantization, const std::string& text) {
    expect_error(ErrorKind::input, text, [&] { read(quantization); });
  };
  refuse({{"quant_method", "awq"}},
         "config.json: expected weights without quantization_config, or of quant_method \"fp8\" or \"mxfp4\"; got "
         "\"awq\"; convert them to bf16 first");
  refuse(7, "got null");
  refuse({{"quant_method", "fp8"}, {"fmt", "e5m2"}},
         "expected quantization_config.fmt \"e4m3\"; got \"e5m2\"; convert the weights to bf16 first");
  for (const json& size : {json(), json(128), json{128}, json{128, 0}, json{128, -1}, json{1.5, 2}}) {
    refuse({{"quant_method", "fp8"}, {"weight_block_size", size}},
           "expected quantization_config.weight_block_size of two whole numbers, [128, 128] for instance; got " +
               size.dump());
  }
}

}  // namespace
}  // namespace moebius
