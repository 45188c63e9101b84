// The longest chains of steps of small kernels.
#include "plan/cost/critical_path.h"

#include <gtest/gtest.h>

#include "plan/cost/update_cost.h"
#include "plan/layout.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

struct Planned {
  PlanMachine machine;
  Assumptions assume;
  EngineSpec spec;
  TimeContext context() const { return {.machine = machine, .assume = assume, .spec = spec}; }
};

Planned planned(std::vector<std::string> set, const char* name = "h200") {
  set.emplace_back("run.device=\"cuda\"");
  return {.machine = machine(name), .spec = planned_engine_spec(recipe("demo.toml", set), 1)};
}

OpWork call_of(const char* name, double flops = 0) { return {.name = name, .calls = 1, .cost = {.flops = flops}}; }
OpWork norm_of(double rows, double width) { return call_of("rms_norm_bwd", 10 * rows * width); }

// 4096 rows of 128 columns have 2112 parts: two rows of a block, and 17 batches of eight loads in 16 strips.
TEST(CriticalPath, OfANormAddsThePartsOfItsBlocks) {
  const Planned p = planned({});
  const CriticalPath path = critical_path(p.context(), norm_of(4096, 128));
  EXPECT_EQ(path.loads, 2 + 17);
  EXPECT_EQ(path.on_chip, 2 * 7 + 15);
  EXPECT_DOUBLE_EQ(path.seconds(), 19 * kLoadSeconds + 29 * kOnChipSeconds);
}

// The norm of a latent vector has fewer columns and more parts: 4096 rows of 2048 have 1056.
TEST(CriticalPath, OfANormFollowsItsWidth) {
  const Planned p = planned({});
  EXPECT_EQ(critical_path(p.context(), norm_of(4096, 2048)).loads, 4 + 9);
  OpWork several = norm_of(4096, 2048);
  several.calls = 3, several.cost.flops *= 3;
  EXPECT_EQ(critical_path(p.context(), several).loads, 4 + 9);
}

// Each of two tp ranks has half of the rows between projections, and half of the vocabulary.
TEST(CriticalPath, IsThatOfTheRowsOfARank) {
  const Planned one = planned({});
  Planned two = planned({});
  two.spec.mesh.tp = 2;
  EXPECT_EQ(critical_path(two.context(), norm_of(2048, 128)).loads, 1 + 16);
  EXPECT_LT(critical_path(two.context(), call_of("balance_stats")).loads,
            critical_path(one.context(), call_of("balance_stats")).loads);
  // Two digits of 6 bits hold 4096 values, but not a rank's 4096 rows and the tokens of others.
  const auto passes = [&](Planned p, int64_t vocab, int64_t tp) {
    p.spec.model.vocab_size = vocab, p.spec.mesh.tp = tp;
    return critical_path(p.context(), call_of("embedding_bwd")).on_chip;
  };
  EXPECT_EQ(passes(one, 4096, 1), passes(one, 8000, 2));
  EXPECT_LT(passes(one, 4096, 1), passes(one, 8192, 2));
  EXPECT_EQ(passes(one, 8192, 1), passes(one, 8192, 2));
}

TEST(CriticalPath, OfRopeIsLongerWithNormsOfHeads) {
  const Planned norms = planned({}), plain = planned({"model.qk_norm=false"});
  EXPECT_GT(critical_path(norms.context(), call_of("rope_bwd")).seconds(),
            2 * critical_path(plain.context(), call_of("rope_bwd")).seconds());
}

// 4096 rows have 264 parts: 16 rows of a block, and for each weight 3 batches of eight loads in 16 strips.
TEST(CriticalPath, OfRopeTakesRowsInTurnWithNormsOfAllHeads) {
  const Planned all = planned({"model.qk_norm=\"whole\""}), plain = planned({"model.qk_norm=false"});
  EXPECT_EQ(critical_path(all.context(), call_of("rope_bwd")).loads, 16 + 2 * 3);
  Planned shared = planned({"model.qk_norm=\"whole\""});
  shared.spec.mesh.tp = 2;
  EXPECT_LE(critical_path(shared.context(), call_of("rope_bwd")).seconds(),
            critical_path(plain.context(), call_of("rope_bwd")).seconds());
}

// The demo's experts have 128 columns, so 4 boxes of 32; a tile has at most 8. Portable kernels have other loops.
TEST(CriticalPath, GatedGradientsTakeTheBoxesOfATileInTurn) {
  const Planned p = planned({}), portable = planned({"run.kernels=\"portable\""});
  const double tokens = 4096, flops = 2 * tokens * 128 * 128;
  EXPECT_EQ(critical_path(p.context(), call_of("d_gated_down", flops)).loads, 3 * 4);
  EXPECT_EQ(critical_path(p.context(), call_of("d_expert_down", 2 * flops)).loads, 3 * 4);
  EXPECT_EQ(critical_path(p.context(), call_of("d_gated_down", 16 * flops)).loads, 3 * 8);
  EXPECT_EQ(critical_path(portable.context(), call_of("d_gated_down", flops)).loads, 0);
}

TEST(CriticalPath, IsThatOfMoebiusOnAGpu) {
  const Planned cpu = planned({}, "epyc2"), gpu = planned({});
  EXPECT_EQ(critical_path(cpu.context(), call_of("route_fwd")).seconds(), 0);
  EXPECT_EQ(critical_path(gpu.context(), call_of("gemm")).seconds(), 0);
  for (const char* op : {"route_fwd", "balance_stats", "embedding_bwd"}) {
    EXPECT_GT(critical_path(gpu.context(), call_of(op)).seconds(), 1e-6) << op;
    EXPECT_LT(critical_path(gpu.context(), call_of(op)).seconds(), 20e-6) << op;
  }
  Planned other = planned({});
  other.assume = parse_assumptions({"system=megatron"});
  EXPECT_EQ(critical_path(other.context(), call_of("route_fwd")).seconds(), 0);
}

double step_seconds(const char* name, const char* file, const std::vector<std::string>& set) {
  PartLibrary parts;
  return predict(parts, recipe(file, set), 1, machine(name), {}, {.simulate = false}).step_s;
}

// Operands of emulated products are quantised and widened, and multiplied in bf16, so a step takes longer than
// without a recipe. Hopper has products for fp8_tensor, and no GPU has them for mxfp8 and nvfp4 in Moebius.
TEST(EmulatedRecipes, TakeLongerThanBf16) {
  const char* file = "bench_qwen3_30b_a3b_8layers.toml";
  const auto seconds = [&](const char* name, std::vector<std::string> set) {
    set.emplace_back("model.num_hidden_layers=1");
    return step_seconds(name, file, set);
  };
  const std::string recipes[] = {"precision.recipe=\"fp8_tensor\"", "precision.recipe=\"mxfp8\"",
                                 "precision.recipe=\"nvfp4\""};
  for (const char* name : {"h200", "gb200"}) {
    const double none = seconds(name, {});
    for (const std::string& set : recipes) {
      const bool has_kernels = set == recipes[0] && std::string(name) == "h200";
      if (has_kernels)
        EXPECT_LT(seconds(name, {set}), none) << name << ", " << set;
      else
        EXPECT_GT(seconds(name, {set}), 1.03 * none) << name << ", " << set;
    }
  }
  // Portable kernels have no products in 8 bits.
  EXPECT_GT(seconds("h200", {"run.kernels=\"portable\"", recipes[0]}), seconds("h200", {"run.kernels=\"portable\""}));
}

// The codes of 8-bit states take more time than their bytes.
TEST(UpdateCost, Of8BitStatesIsTheirArithmetic) {
  const char* file = "bench_qwen3_30b_a3b_8layers.toml";
  PartLibrary parts;
  const auto optimizer_s = [&](const char* state) {
    const RunSpec run = recipe(file, {"model.num_hidden_layers=2", "optimizer.master=\"bf16_stochastic\"", state});
    return predict(parts, run, 1, machine("h200"), {}, {.simulate = false}).phases.at("optimizer");
  };
  EXPECT_GT(optimizer_s("optimizer.state=\"8bit\""), 1.5 * optimizer_s("optimizer.state=\"bf16\""));
  EXPECT_EQ(update_operations({}), 0);
}

// SGD has one moment, or none without momentum.
TEST(UpdateCost, Of8BitStatesCountsTheMoments) {
  OptimizerSpec o{.state = StateFormat::blocks_8bit};
  EXPECT_EQ(update_operations(o), 2 * kCodeOperations);
  o.kind = OptimizerKind::sgd, o.momentum = 0.9;
  EXPECT_EQ(update_operations(o), kCodeOperations);
  o.momentum = 0;
  EXPECT_EQ(update_operations(o), 0);
}

}  // namespace
}  // namespace moebius
