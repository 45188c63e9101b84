#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// The bubble of zb_h1 is a third of 1f1b's if its three passes take the same time. A rank after the first one
// keeps inputs of weight gradients.
TEST(Predict, ZbH1WaitsLessAndKeepsMore) {
  PartLibrary parts;
  const auto predicted = [&](const char* schedule, bool simulate) {
    const RunSpec run = recipe("bench_olmoe_1b_7b.toml",
                               {"parallel.pp=4", "parallel.layout=E t*4 | t*4 | t*4 | t*4 L", "train.micro_batch=1",
                                "train.global_batch=8", std::string("parallel.schedule=") + schedule});
    return predict(parts, run, 4, machine("h200"), {}, {.simulate = simulate});
  };
  const Prediction plain = predicted("1f1b", true), split = predicted("zb_h1", true);
  EXPECT_LT(split.step_s, plain.step_s);
  EXPECT_LT(split.bubble, 0.75 * plain.bubble);
  EXPECT_GT(split.bubble, 0.2 * plain.bubble);
  EXPECT_NEAR(predicted("zb_h1", false).step_s, split.step_s, 0.1 * split.step_s);
  EXPECT_EQ(split.memory.at(0).of(Life::saved), plain.memory.at(0).of(Life::saved));
  EXPECT_GT(split.memory.at(3).of(Life::saved), 4 * plain.memory.at(3).of(Life::saved));
  double sum = 0;
  for (const auto& [phase, seconds] : split.phases) sum += seconds;
  EXPECT_NEAR(sum, split.step_s, 1e-9);
}

// Each of the two passes recomputes its inputs, so recompute takes more of a step than with 1F1B.
TEST(Predict, ZbH1RecomputesTwice) {
  PartLibrary parts;
  const auto compute = [&](const char* schedule, const char* recompute) {
    const Prediction p =
        predict(parts,
                recipe("bench_dense_3b.toml",
                       {"parallel.pp=2", "train.micro_batch=1", "train.global_batch=8",
                        std::string("parallel.schedule=") + schedule, std::string("memory.recompute=") + recompute}),
                2, machine("h200"), {});
    return p.phases.at("forward") + p.phases.at("backward");
  };
  const double plain = compute("1f1b", "[\"layer\"]") - compute("1f1b", "[]");
  const double split = compute("zb_h1", "[\"layer\"]") - compute("zb_h1", "[]");
  EXPECT_GT(plain, 0);
  EXPECT_GT(split, 1.5 * plain);
}

TEST(Predict, MegatronHasNoZbH1) {
  PartLibrary parts;
  Assumptions megatron;
  megatron.system = PlanSystem::megatron;
  const RunSpec run = recipe("bench_dense_3b.toml", {"parallel.pp=2", "parallel.schedule=zb_h1"});
  EXPECT_THAT([&] { predict(parts, run, 2, machine("h200"), megatron); },
              testing::ThrowsMessage<Error>(testing::HasSubstr("Megatron Core has only 1F1B; got parallel.schedule")));
}

}  // namespace
}  // namespace moebius
