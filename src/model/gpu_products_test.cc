#include "model/gpu_products.h"

#include <gmock/gmock.h>

#include "core/error.h"

namespace moebius {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The widths of a model that every recipe takes.
ModelSpec small_moe() {
  ModelSpec m;
  m.hidden_size = 256;
  m.vocab_size = 64;
  m.num_layers = 2;
  m.num_heads = 4;
  m.num_kv_heads = 2;
  m.head_dim = 64;
  m.num_experts = 4;
  m.top_k = 2;
  m.moe_intermediate_size = 128;
  m.moe_layers.assign(m.num_layers, true);
  return m;
}

std::string error_of(const ModelSpec& m, const PrecisionSpec& precision, DeviceKind device = DeviceKind::cuda,
                     const LoraSpec& lora = {}) {
  try {
    check_quantised_products(m, precision, lora, device);
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::usage);
    return e.what();
  }
  return "";
}

TEST(QuantisedProducts, AreNamedWhereAGpuHasNoKernelForTheirShape) {
  const PrecisionSpec blocks{.recipe = PrecisionRecipe::fp8_block};
  ModelSpec m = small_moe();
  EXPECT_EQ(error_of(m, blocks), "");
  m.hidden_size = 248;
  EXPECT_THAT(error_of(m, blocks),
              AllOf(HasSubstr("the products of model.layers.*.self_attn.qkv_proj.weight need rows and columns in "
                              "multiples of 16; got 512 x 248"),
                    HasSubstr("add \"model.layers.*.self_attn.q_proj.weight\", "
                              "\"model.layers.*.self_attn.k_proj.weight\", "
                              "\"model.layers.*.self_attn.v_proj.weight\" to precision.keep")));
  EXPECT_EQ(error_of(m, blocks, DeviceKind::cpu), "");
  m = small_moe();
  m.moe_intermediate_size = 192;
  EXPECT_THAT(error_of(m, blocks), HasSubstr("experts.gate_up_proj need an inner width in multiples of 128; got 192"));
  EXPECT_EQ(error_of(m, {.recipe = PrecisionRecipe::fp8_block, .keep = {"*.experts.*"}}), "");
  EXPECT_EQ(error_of(m, {.recipe = PrecisionRecipe::fp8_tensor}), "") << "others are emulated";
  m = small_moe();
  m.swiglu_limit = 7;
  EXPECT_THAT(error_of(m, blocks), HasSubstr("need experts without biases and without a clamp"));
}

// Adapters of gate and up take their products apart from the activation, which needs the width.
TEST(QuantisedProducts, DenseLayersWithAdaptersHaveAnyInnerWidth) {
  ModelSpec m = small_moe();
  m.intermediate_size = 192;
  m.moe_layers.assign(m.num_layers, false);
  const PrecisionSpec blocks{.recipe = PrecisionRecipe::fp8_block};
  EXPECT_THAT(error_of(m, blocks), HasSubstr("need an inner width in multiples of 128; got 192"));
  EXPECT_EQ(error_of(m, blocks, DeviceKind::cuda, {.rank = 8}), "");
}

TEST(QuantisedProducts, OfNvfp4AreNamedWhereAWidthIsOdd) {
  ModelSpec m = small_moe();
  m.moe_intermediate_size = 33;
  for (const DeviceKind device : {DeviceKind::cpu, DeviceKind::cuda})
    EXPECT_THAT(error_of(m, {.recipe = PrecisionRecipe::nvfp4}, device),
                HasSubstr("experts.down_proj needs even rows and columns; got 256 x 33; change the width, or add "
                          "\"model.layers.*.mlp.experts.*.down_proj.weight\" to precision.keep"));
  EXPECT_EQ(error_of(m, {.recipe = PrecisionRecipe::mxfp8}), "");
}

}  // namespace
}  // namespace moebius
