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

}  // namespace
}  // namespace moebius
