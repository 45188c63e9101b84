#include <gtest/gtest.h>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// The bubble of zb_h1 is a third of that of 1f1b where its three passes take the same time. A rank after the first one
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

}  // namespace
}  // namespace moebius
