// The longest chains of steps of small kernels, and products whose rows are not whole vectors.
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

// 4096 rows of 128 columns have 2112 parts: two rows of a block, and 17 batches of eight loads in 16 strips.
TEST(CriticalPath, OfANormAddsThePartsOfItsBlocks) {
  const Planned p = planned({});
  const CriticalPath path = critical_path(p.context(), "rms_norm_bwd");
  EXPECT_EQ(path.loads, 2 + 17);
  EXPECT_EQ(path.on_chip, 2 * 7 + 15);
  EXPECT_DOUBLE_EQ(path.seconds(), 19 * kLoadSeconds + 29 * kOnChipSeconds);
}

TEST(CriticalPath, OfRopeIsLongerWithNormsOfHeads) {
  const Planned norms = planned({}), plain = planned({"model.qk_norm=false"});
  EXPECT_GT(critical_path(norms.context(), "rope_bwd").seconds(),
            2 * critical_path(plain.context(), "rope_bwd").seconds());
}

TEST(CriticalPath, IsThatOfMoebiusOnAGpu) {
  const Planned cpu = planned({}, "epyc2"), gpu = planned({});
  EXPECT_EQ(critical_path(cpu.context(), "route_fwd").seconds(), 0);
  EXPECT_EQ(critical_path(gpu.context(), "gemm").seconds(), 0);
  for (const char* op : {"route_fwd", "balance_stats", "embedding_bwd"}) {
    EXPECT_GT(critical_path(gpu.context(), op).seconds(), 1e-6) << op;
    EXPECT_LT(critical_path(gpu.context(), op).seconds(), 20e-6) << op;
  }
  Planned other = planned({});
  other.assume = parse_assumptions({"system=megatron"});
  EXPECT_EQ(critical_path(other.context(), "route_fwd").seconds(), 0);
}

// Rows of 257 logits begin at any element; the gradient of the weights has three tiles for 132 multiprocessors.
TEST(OddLoss, TakesALoadForEachElement) {
  const Planned odd = planned({}), even = planned({"model.vocab_size=264"});
  constexpr double kFlops = 6e9, kRate = 6e14;
  EXPECT_EQ(odd_loss_seconds(even.context(), "lm_loss", kFlops, kRate), 0);
  EXPECT_EQ(odd_loss_seconds(odd.context(), "gemm", kFlops, kRate), 0);
  const double product = kFlops / 3 / kRate * 8;
  EXPECT_NEAR(odd_loss_seconds(odd.context(), "lm_loss", kFlops, kRate),
              product * (132.0 / 96 + 132.0 / 32 + 132.0 / 3), 1e-12);
}

double step_seconds(const char* name, const char* file, const std::vector<std::string>& set) {
  PartLibrary parts;
  return predict(parts, recipe(file, set), 1, machine(name), {}, {.simulate = false}).step_s;
}

// Operands of emulated products are quantised and widened, and multiplied in bf16, so a step takes longer than without a
// recipe. Hopper has products for fp8_tensor, and no GPU has them for mxfp8 and nvfp4 in Moebius.
TEST(EmulatedRecipes, TakeLongerThanNone) {
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

}  // namespace
}  // namespace moebius
