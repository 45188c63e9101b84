// The kernels that ops launch, as a plan counts them.
#include "plan/cost/launches.h"

#include <gtest/gtest.h>

#include "plan/layout.h"
#include "plan/part.h"
#include "plan/testing.h"

namespace moebius {
namespace {

TEST(Launches, CountsTheKernelsOfAnOp) {
  EXPECT_EQ(launches_of("attention_bwd", {}), 3);
  EXPECT_EQ(launches_of("silu", {}), 1);
  EXPECT_EQ(launches_of("expert_wgrad", {}), 1);
  EXPECT_EQ(launches_of("expert_wgrad", {.clears_experts = true}), 2);
  EXPECT_EQ(launches_of("rope_bwd", {}), 1);
  EXPECT_EQ(launches_of("rope_bwd", {.norms_in_rope = true}), 3);
  EXPECT_EQ(launches_of("qk_norm_block_bwd", {}), 3);
  EXPECT_EQ(launches_of("router_logits_bwd", {}), 5);
  EXPECT_EQ(launches_of("router_logits_bwd", {.biases_router = true}), 7);
  EXPECT_EQ(launches_of("sum_rows", {}), 2);
  EXPECT_EQ(launches_of("destinations", {}), 2);
  EXPECT_EQ(launches_of("index_rows", {}), 2);
  EXPECT_EQ(launches_of("index_routes", {}), 2);
  EXPECT_EQ(launches_of("lm_logits_block", {}) + launches_of("lm_loss_block", {}), launches_of("lm_loss", {}) + 1);
}

// The first micro-batch of a step stores gradients, and clears them for experts without rows. Products in f32 and
// quantised ones write them too; those of a recipe may leave gradients of weights out.
TEST(Launches, ClearExpertsOnlyWhereBf16ProductsStoreGradients) {
  PartLibrary library;
  const auto of_gradients = [&](std::vector<std::string> set, PassWork PartWork::*pass) -> int64_t {
    set.emplace_back("run.device=\"cuda\"");
    const EngineSpec spec = planned_engine_spec(recipe("bench_olmoe_1b_7b.toml", set), 1);
    for (const OpWork& op : (LayoutParts(library, spec).layer(0).*pass).ops)
      if (op.name == "expert_wgrad") return op.kernels;
    return 0;
  };
  const std::string quantised = "precision.recipe=\"fp8_block\"", plain = "precision.weight_gradients=\"compute\"";
  EXPECT_EQ(of_gradients({}, &PartWork::first_backward), 2);
  EXPECT_EQ(of_gradients({}, &PartWork::backward), 1);
  EXPECT_EQ(of_gradients({"precision.compute=\"f32\""}, &PartWork::first_backward), 1);
  EXPECT_EQ(of_gradients({quantised}, &PartWork::first_backward), 1);
  EXPECT_EQ(of_gradients({quantised, plain}, &PartWork::first_backward), 2);
}

// OLMoE normalises all heads together: in RoPE, or before it where ranks share the heads, or heads are clipped.
TEST(Launches, OfRopeCountTheGradientsOfItsNorms) {
  PartLibrary library;
  const auto of_backward = [&](std::vector<std::string> set, int ranks, const std::string& name) -> int64_t {
    set.emplace_back("run.device=\"cuda\"");
    const EngineSpec spec = planned_engine_spec(recipe("bench_olmoe_1b_7b.toml", set), ranks);
    for (const OpWork& op : LayoutParts(library, spec).layer(0).backward.ops)
      if (op.name == name) return op.kernels;
    return 0;
  };
  EXPECT_EQ(of_backward({}, 1, "rope_bwd"), 3);
  EXPECT_EQ(of_backward({}, 1, "qk_norm_block_bwd"), 0);
  EXPECT_EQ(of_backward({"parallel.tp=2"}, 2, "rope_bwd"), 1);
  EXPECT_EQ(of_backward({"parallel.tp=2"}, 2, "qk_norm_block_bwd"), 3);
  EXPECT_EQ(of_backward({"model.clip_qkv=8"}, 1, "qk_norm_block_bwd"), 3);
  EXPECT_EQ(of_backward({"model.qk_norm=true"}, 1, "rope_bwd"), 3);
}

// gpt-oss has a router with a bias, whose gradient is summed in the same op.
TEST(Launches, OfRoutersCountTheGradientOfTheirBias) {
  PartLibrary library;
  const auto of_router = [&](const char* name) -> int64_t {
    const EngineSpec spec = planned_engine_spec(recipe(name, {"run.device=\"cuda\""}), 1);
    for (const OpWork& op : LayoutParts(library, spec).layer(0).backward.ops)
      if (op.name == "router_logits_bwd") return op.kernels;
    return 0;
  };
  EXPECT_EQ(of_router("bench_gpt_oss_20b_8layers.toml"), 7);
  EXPECT_EQ(of_router("bench_olmoe_1b_7b.toml"), 5);
}

}  // namespace
}  // namespace moebius
