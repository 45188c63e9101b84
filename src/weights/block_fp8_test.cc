#include "weights/block_fp8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "config/hf/config.h"
#include "core/narrow_float.h"
#include "model/catalog.h"

namespace moebius {
namespace {

// Released weights: E4M3 codes, and scales that are no powers of two, as amax / 448 is.
struct Released {
  Released(int64_t rows, int64_t cols, ReleasedScales form) : rows(rows), cols(cols), scales(std::move(form)) {
    std::mt19937 random(3);
    const Shape blocks = block_scales_shape({rows, cols}, scales.block_rows, scales.block_cols);
    for (int64_t i = 0; i < blocks.numel(); ++i)
      scales.scales.push_back(std::exp(static_cast<float>(random() % 999) / 99 - 9));
    scales.scales[1] = 0;
    for (int64_t i = 0; i < rows * cols; ++i) {
      const float scale = scales.scales[i / cols / scales.block_rows * blocks[1] + i % cols / scales.block_cols];
      const auto code = static_cast<uint8_t>(random() % 256);
      codes.push_back((code & 0x7f) == 0x7f ? 0 : scale == 0 ? code & 0x80 : code);
      values.push_back(kF8E4m3Values[codes.back()] * scale);
    }
  }
  int64_t rows, cols;
  ReleasedScales scales;
  std::vector<uint8_t> codes;
  std::vector<float> values;
};

TEST(BlockFp8, ReleasedBitsRoundTrip) {
  for (const auto& [rows, cols] : {std::pair{8, 16}, {128, 128}}) {
    const Released r(150, 270, {.block_rows = rows, .block_cols = cols});
    const BlockFp8 packed = to_block_fp8(r.values.data(), r.rows, r.cols, r.scales);
    EXPECT_EQ(packed.data, r.codes);
    EXPECT_EQ(packed.scales, r.scales.scales);
  }
}

// The blocks of weights that have changed since get scales of their own.
TEST(BlockFp8, ChangedBlocksGetPowerOfTwoScales) {
  Released r(20, 32, {.block_rows = 8, .block_cols = 16});
  r.values[0] = 3.14159f;
  const BlockFp8 packed = to_block_fp8(r.values.data(), r.rows, r.cols, r.scales);
  EXPECT_NE(packed.scales[0], r.scales.scales[0]);
  int exponent = 0;
  EXPECT_EQ(std::frexp(packed.scales[0], &exponent), 0.5f);
  EXPECT_EQ(std::vector(packed.scales.begin() + 1, packed.scales.end()),
            std::vector(r.scales.scales.begin() + 1, r.scales.scales.end()));
}

// Blocks of 128 x 128, and a scale of 1 where all is zero.
TEST(BlockFp8, WithoutReleasedScalesUsesThoseOfTheRecipe) {
  std::vector<float> x(130 * 129);
  x[0] = 448;
  x[128] = -1e-3f;
  const BlockFp8 packed = to_block_fp8(x.data(), 130, 129, {});
  EXPECT_EQ(packed.scales, (std::vector<float>{1, 0x1p-18f, 1, 1}));
  EXPECT_EQ(packed.data[0], 0x7e);
  EXPECT_EQ(kF8E4m3Values[packed.data[128]] * packed.scales[1], -256 * 0x1p-18f);
}

// 6 heads of 96 are 4.5 blocks, and 4 heads are 3. An up projection may end within a block, a gate may not.
TEST(BlockFp8, MatricesThatAreJoinedHaveWholeBlocks) {
  const auto matrices = [](int64_t heads, int64_t kv_heads, int64_t intermediate_size) {
    const std::vector<std::string> names =
        block_fp8_matrices(ModelCatalog(model_spec_from_hf({{"model_type", "qwen3_moe"},
                                                            {"vocab_size", 11},
                                                            {"hidden_size", 128},
                                                            {"intermediate_size", intermediate_size},
                                                            {"mlp_only_layers", {0}},
                                                            {"num_hidden_layers", 1},
                                                            {"num_attention_heads", heads},
                                                            {"num_key_value_heads", kv_heads},
                                                            {"head_dim", 96},
                                                            {"num_experts", 2},
                                                            {"num_experts_per_tok", 1},
                                                            {"moe_intermediate_size", 8},
                                                            {"max_position_embeddings", 16}},
                                                           "test")));
    std::string text;
    for (const std::string& name : names) text += name.substr(name.rfind('.', name.size() - 8) + 1, 1);
    return text;
  };
  EXPECT_EQ(matrices(4, 4, 128), "qkvogud");
  EXPECT_EQ(matrices(4, 2, 128), "ogud");
  EXPECT_EQ(matrices(6, 6, 128), "ogud");
  EXPECT_EQ(matrices(4, 4, 192), "qkvod");
}

}  // namespace
}  // namespace moebius
