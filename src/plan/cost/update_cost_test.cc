#include "plan/cost/update_cost.h"

#include <gtest/gtest.h>

#include "plan/predict.h"
#include "plan/testing.h"

namespace moebius {
namespace {

// The states that a buffer keeps on the device are not moved. Sums of gradients are.
TEST(UpdateCost, LeavesOutStatesInTheBuffer) {
  constexpr double kGiB = int64_t{1} << 30;
  OptimizerSpec o{.state = StateFormat::f32, .master = MasterFormat::bf16_stochastic, .grad = GradFormat::bf16};
  EXPECT_EQ(host_update_bytes(o, kGiB), 0);
  o.offload = true;
  EXPECT_EQ(host_update_bytes(o, kGiB), 8 * kGiB);
  o.offload_buffer = 3;
  EXPECT_EQ(host_update_bytes(o, kGiB), 5 * kGiB);
  o.offload_grad = true;
  EXPECT_EQ(host_update_bytes(o, kGiB), 7 * kGiB);
  o.offload_buffer = 9;
  EXPECT_EQ(host_update_bytes(o, kGiB), 2 * kGiB);
}

TEST(UpdateCost, BufferedStatesLeaveTheHostLinkOfAPlan) {
  PartLibrary parts;
  const auto link = [&](const char* buffer) {
    const std::vector<std::string> set{"optimizer.master=\"bf16_stochastic\"", "optimizer.state=\"8bit\"",
                                       "optimizer.offload=true", buffer};
    return predict(parts, recipe("bench_qwen3_30b_a3b_8layers.toml", set), 2, machine("h100"), {})
        .phases.at("host link");
  };
  const double gib_s = (int64_t{1} << 30) / (machine("h100").link_gb_s * 1e9);
  EXPECT_NEAR(link("optimizer.offload_buffer=0") - link("optimizer.offload_buffer=1"), gib_s, 1e-6);
  EXPECT_EQ(link("optimizer.offload_buffer=100"), 0);
}

// Steps of one H200 with buffers of 0, 2 and 6 GiB took 8.1, 5.7 and -1.1 % more than with states on the GPU
// (docs/measurements/memory.md). Their links moved 44.9, 43.1 and 45.4 GB/s.
TEST(UpdateCost, OfStatesOnTheHostIsAsMeasured) {
  PartLibrary parts;
  const auto step_s = [&](double link, const std::vector<std::string>& more) {
    std::vector<std::string> set{"train.micro_batch=4", "optimizer.master=\"bf16_stochastic\"",
                                 "optimizer.state=\"8bit\""};
    set.insert(set.end(), more.begin(), more.end());
    PlanMachine h200 = machine("h200");
    h200.link_gb_s = link;
    return predict(parts, recipe("bench_qwen3_30b_a3b_8layers.toml", set), 1, h200, {}).step_s;
  };
  const auto more = [&](double link, const char* buffer) {
    return 100 * (step_s(link, {"optimizer.offload=true", buffer}) / step_s(link, {}) - 1);
  };
  EXPECT_NEAR(more(44.9, "optimizer.offload_buffer=0"), 8.1, 1);
  EXPECT_NEAR(more(43.1, "optimizer.offload_buffer=2"), 5.7, 1);
  EXPECT_NEAR(more(45.4, "optimizer.offload_buffer=6"), -1.1, 2);
}

TEST(UpdateCost, IsHiddenByItsKernelsAndByAPass) {
  EXPECT_EQ(exposed_update_seconds(/*moves_s=*/4, /*kernels_s=*/1, /*pass_s=*/0), 3);
  EXPECT_EQ(exposed_update_seconds(4, 0, 1), 3);
  EXPECT_EQ(exposed_update_seconds(4, 1, 1), 2.25) << "a quarter of the kernels runs beside the pass";
  EXPECT_EQ(exposed_update_seconds(4, 1, 9), 0);
  EXPECT_EQ(exposed_update_seconds(4, 5, 1), 0);
}

}  // namespace
}  // namespace moebius
