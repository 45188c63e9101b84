// The kernels of the loss: products, the pass over the logits, and rows that are not whole vectors.
#include "plan/cost/loss_time.h"

#include <gtest/gtest.h>

#include "plan/cost/critical_path.h"
#include "plan/layout.h"
#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

constexpr double kRate = 6e14;
constexpr double kNoTraffic = 1e30;  // bytes a second

struct Planned {
  PlanMachine machine;
  Assumptions assume;
  EngineSpec spec;
  TimeContext context() const { return {.machine = machine, .assume = assume, .spec = spec}; }
  double product() const {  // seconds of one
    const auto& m = spec.model;
    return 2.0 * static_cast<double>(spec.shape.tokens() * m.hidden_size * div_ceil(m.vocab_size, spec.mesh.tp)) /
           kRate;
  }
  double seconds(const char* op, double products, double memory = kNoTraffic) const {
    return loss_seconds(context(), {.name = op, .calls = 1, .cost = {.flops = products * product() * kRate}}, kRate,
                        memory);
  }
};

Planned planned(std::vector<std::string> set, const char* name = "h200") {
  set.emplace_back("run.device=\"cuda\"");
  return {.machine = machine(name), .spec = planned_engine_spec(recipe("demo.toml", set), 1)};
}

// The logits of 4096 tokens have 4 bytes, and their gradients 2. In a product whose operands take no time, the loss
// reads the first and writes the second.
TEST(LossTime, HasAPassOverTheLogits) {
  const Planned p = planned({"model.vocab_size=32768"});
  const double logits = static_cast<double>(p.spec.shape.tokens()) * 32768, memory = 1e12;
  const double products = p.seconds("lm_loss", 3);
  EXPECT_GT(p.seconds("lm_loss", 3, memory), products + 6 * logits / memory);
  // Each kernel that only moves bytes takes as long: 4 for the first product, 6 for the loss, 2 for each other product,
  // and x, w and dw.
  EXPECT_LT(p.seconds("lm_loss", 3, memory), products + 1.1 * 14 * logits / memory);
  EXPECT_GT(p.seconds("lm_loss", 3, memory), p.seconds("lm_loss", 2, memory));
}

TEST(LossTime, IsTheSameForOneOpAndForItsTwoParts) {
  const Planned p = planned({"model.vocab_size=32768"});
  EXPECT_NEAR(p.seconds("lm_logits_block", 1, 1e12) + p.seconds("lm_loss_block", 2, 1e12),
              p.seconds("lm_loss", 3, 1e12), 1e-9);
}

TEST(LossTime, IsThatOfMoebiusOnAGpu) {
  EXPECT_EQ(planned({}).seconds("gemm", 3), 0);
  EXPECT_EQ(planned({}, "epyc2").seconds("lm_loss", 3), 0);
  Planned other = planned({});
  other.assume = parse_assumptions({"system=megatron"});
  EXPECT_EQ(other.seconds("lm_loss", 3), 0);
}

// Rows of 257 logits begin at any element: products load 16 terms and then multiply them. The gradient of the weights
// has three tiles for 132 multiprocessors, and 4096 terms.
TEST(OddLoss, LoadsBeforeItMultiplies) {
  const Planned odd = planned({}), even = planned({"model.vocab_size=264"});
  EXPECT_NEAR(odd.seconds("lm_loss", 3),
              odd.product() * (132.0 / 96 + 132.0 / 32 + 132.0 / 3) + (8 + 17 + 256) * kLoadSeconds, 1e-9);
  EXPECT_LT(even.seconds("lm_loss", 3), odd.seconds("lm_loss", 3) / 4);
  EXPECT_LT(planned({"precision.compute=\"f32\""}).seconds("lm_loss", 3), odd.seconds("lm_loss", 3) / 4);
}

// With tp the rank's part counts: 264 logits are whole vectors on one rank, and 132 of each of two are not.
TEST(OddLoss, IsThatOfTheRanksPartOfTheVocabulary) {
  Planned p = planned({"model.vocab_size=264"});
  p.spec.mesh.tp = 2;
  EXPECT_NEAR(p.seconds("lm_logits_block", 1), p.product() * 132.0 / 64 + 8 * kLoadSeconds, 1e-9);
  p.spec.model.vocab_size = 272;
  EXPECT_LT(p.seconds("lm_logits_block", 1), 3 * p.product());
}

TEST(OddLoss, ProductsThatFillTheGpuTakeNoLonger) {
  Planned p = planned({"model.vocab_size=151937"});
  p.spec.model.hidden_size = 2048;
  EXPECT_NEAR(p.seconds("lm_loss", 3), 3 * p.product(), 0.1 * p.product());
}

}  // namespace
}  // namespace moebius
