// Products of few tiles, which leave multiprocessors of a GPU idle.
#include "plan/cost/multiprocessors.h"

#include <gtest/gtest.h>

#include "plan/layout.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

constexpr double kTile = 128.0 * 128 * 128;
const OpWork kGemm{.name = "gemm", .kind = KernelClass::products, .calls = 1};
const OpWork kGradients{.name = "expert_wgrad", .kind = KernelClass::experts, .calls = 1};

TEST(IdleMultiprocessors, OfAProductWithFewTiles) {
  const PlanMachine h200 = machine("h200"), cpu = machine("epyc2");
  const Assumptions assume;
  const EngineSpec spec;
  const TimeContext c{.machine = h200, .assume = assume, .spec = spec};
  const auto idle = [&](const OpWork& op, double tiles) {
    return idle_multiprocessors(c, op, {.flops = 2 * kTile * tiles});
  };
  EXPECT_DOUBLE_EQ(idle(kGemm, 66), 2);
  EXPECT_DOUBLE_EQ(idle(kGemm, 0.1), 132);
  EXPECT_DOUBLE_EQ(idle(kGemm, 132), 1);
  EXPECT_DOUBLE_EQ(idle(kGemm, 1e6), 1);
  EXPECT_DOUBLE_EQ(idle({.name = "rms_norm_fwd", .kind = KernelClass::memory, .calls = 1}, 1), 1);
  EXPECT_DOUBLE_EQ(idle({.name = "router_logits_fwd", .kind = KernelClass::products, .calls = 1}, 1), 1);
  // A product with few terms in each sum has more tiles than its FLOPs tell.
  EXPECT_DOUBLE_EQ(idle_multiprocessors(c, kGemm, {.flops = 2 * kTile, .bytes = 33 * 6 * 128.0 * 128}), 4);
  const TimeContext on_cpu{.machine = cpu, .assume = assume, .spec = spec};
  EXPECT_DOUBLE_EQ(idle_multiprocessors(on_cpu, kGemm, {.flops = 1}), 1);
}

// A block sums all rows of an expert, so the number of rows adds no tiles. The demo's model has eight experts whose
// weights have 256 x 128 elements, and a rank of two has four of them.
TEST(IdleMultiprocessors, OfTheGradientsOfExperts) {
  const PlanMachine h200 = machine("h200");
  const auto idle = [&](std::vector<std::string> set, int64_t ranks, double flops) {
    const Assumptions assume;
    set.emplace_back("run.device=\"cuda\"");
    const EngineSpec spec = planned_engine_spec(recipe("demo.toml", set), ranks);
    return idle_multiprocessors({.machine = h200, .assume = assume, .spec = spec}, kGradients, {.flops = flops});
  };
  EXPECT_DOUBLE_EQ(idle({}, 1, 4e8), 132.0 / 8);
  EXPECT_DOUBLE_EQ(idle({}, 1, 4e12), 132.0 / 8);
  EXPECT_DOUBLE_EQ(idle({"parallel.ep=2", "train.micro_batch=8"}, 2, 4e8), 132.0 / 4);
  EXPECT_DOUBLE_EQ(idle({"model.hidden_size=1024"}, 1, 4e8), 132.0 / 64);
  // Other kernels split the rows.
  EXPECT_DOUBLE_EQ(idle({"run.kernels=\"portable\""}, 1, 4e12), 1);
  EXPECT_DOUBLE_EQ(idle({"precision.compute=\"f32\""}, 1, 4e12), 1);
}

// The demo's rows of experts are 64 tiles of 128 rows and 256 columns. A result of 128 columns fills half of each.
TEST(IdleMultiprocessors, RowsOfExpertsHaveWideTiles) {
  const PlanMachine h200 = machine("h200"), b200 = machine("b200");
  const Assumptions assume;
  const EngineSpec spec = planned_engine_spec(recipe("demo.toml", {"run.device=\"cuda\""}), 1);
  const auto idle = [&](const PlanMachine& m, const char* name, double columns, double rows) {
    const OpWork op{.name = name, .kind = KernelClass::experts, .calls = 1};
    return idle_multiprocessors({.machine = m, .assume = assume, .spec = spec}, op,
                                {.flops = 2 * rows * columns * 128});
  };
  EXPECT_DOUBLE_EQ(idle(h200, "expert_up", 256, 8192), 132.0 / 64);
  EXPECT_DOUBLE_EQ(idle(h200, "d_expert_down", 128, 8192), 2 * 132.0 / 64);
  EXPECT_DOUBLE_EQ(idle(h200, "gated_up", 256, 4096), 132.0 / 32);
  EXPECT_DOUBLE_EQ(idle(h200, "expert_up", 256, 1e6 * 128), 1);
  EXPECT_DOUBLE_EQ(idle(b200, "expert_up", 256, 8192), b200.multiprocessors / 128) << "other kernels";
}

double products_ms(const std::vector<std::string>& set) {
  PartLibrary parts;
  return 1e3 *
         predict(parts, recipe("demo.toml", set), 1, machine("h200"), {}, {.simulate = false}).kernels.at("products");
}

// With half of the tokens, products of few tiles take the same time.
TEST(IdleMultiprocessors, AreInTheTimeOfAStep) {
  const std::string vocab = "model.vocab_size=264";  // whole vectors, so that the loss takes little
  const double whole = products_ms({vocab}), half = products_ms({vocab, "train.micro_batch=8", "train.global_batch=8"});
  EXPECT_GT(half, 0.9 * whole);
}

}  // namespace
}  // namespace moebius
