#include "train/watch/host_link.h"

#include <gtest/gtest.h>

#include "train/testing.h"

namespace moebius {
namespace {

TEST(HostLink, TheRateIsThatOfTheLastStep) {
  HostLink link(9e9, /*num_micro_batches=*/1);
  EXPECT_FALSE(link.is_known());
  link.add_step({.states_s = 0.2}, 4);
  link.add_step({.states_s = 0.3}, 4);
  ASSERT_TRUE(link.is_known());
  EXPECT_DOUBLE_EQ(link.bytes_per_s(), 3e10);
  EXPECT_EQ(link.text(),
            "the update moved 8.38 GiB over the link of the host at 30.0 GB/s each way; plans for PCIe 5 assume 45.0 "
            "GB/s");
}

TEST(HostLink, RateIsUnknownWithoutStatesOnTheHost) {
  for (HostLink link : {HostLink(), HostLink(0, 1)}) {
    for (int i = 0; i < 20; ++i) link.add_step({.states_s = 1}, 1);
    EXPECT_FALSE(link.is_known());
    EXPECT_FALSE(link.became_slow());
  }
}

// 9 GB take 0.2 s by the plan. With 0.5 s the host is slow for a step of 4 s, and not for one of 7 s, in which the
// 0.3 s more are less than 5 %.
TEST(HostLink, AHostIsSlowAfterTenSlowStepsInARow) {
  HostLink link(9e9, /*num_micro_batches=*/1);
  const auto step = [&](double states_s, double step_s) {
    link.add_step({.states_s = states_s}, step_s);
    return link.became_slow();
  };
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(step(0.5, 4));
  EXPECT_FALSE(step(0.3, 4)) << "more than half of the planned rate";
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(step(0.5, 7)) << "a small share of the step";
  for (int i = 0; i < 9; ++i) EXPECT_FALSE(step(0.5, 4));
  EXPECT_TRUE(step(0.5, 4));
  EXPECT_FALSE(step(0.5, 4)) << "once";
}

// The forward pass takes 0.9 s, and so does the update, which waits for its kernels: the link is not slow. A forward
// pass of 3 s waits for the host.
TEST(HostLink, AnOverlappedUpdateMayWaitForPasses) {
  HostLink link(9e9, /*num_micro_batches=*/1);
  for (int i = 0; i < 20; ++i) {
    link.add_step({.passes_s = 2.7, .states_s = 0.9, .states_overlap = true}, 2.8);
    EXPECT_FALSE(link.became_slow());
  }
  EXPECT_EQ(link.text(),
            "the update moved 8.38 GiB over the link of the host at 10.0 GB/s or more each way; plans for PCIe 5 "
            "assume 45.0 GB/s");
  for (int i = 0; i < 9; ++i) {
    link.add_step({.passes_s = 4.8, .states_s = 3, .states_overlap = true}, 4.9);
    EXPECT_FALSE(link.became_slow());
  }
  link.add_step({.passes_s = 4.8, .states_s = 3, .states_overlap = true}, 4.9);
  EXPECT_TRUE(link.became_slow());
}

// A step has 4 micro-batches of 0.3 s forward and 0.6 s backward. The first forward pass waits for an update of 3 s.
TEST(HostLink, OneOfSeveralMicroBatchesWaits) {
  HostLink link(9e9, /*num_micro_batches=*/4);
  for (int i = 0; i < 10; ++i) link.add_step({.passes_s = 6.3, .states_s = 3, .states_overlap = true}, 6.4);
  EXPECT_TRUE(link.became_slow());
  HostLink hidden(9e9, /*num_micro_batches=*/4);
  for (int i = 0; i < 20; ++i) {
    hidden.add_step({.passes_s = 3.6, .states_s = 0.3, .states_overlap = true}, 3.7);
    EXPECT_FALSE(hidden.became_slow());
  }
}

// The masters, the two moments with the scales of their codes, and the sums of gradients, which the norm reads too.
TEST(HostLink, AnUpdateReadsWhatIsOnTheHost) {
  RunSpec run = testing::tiny_run();
  run.precision.compute = DType::bf16;
  const auto bytes = [&] { return bytes_read_from_host(Engine(training_engine_spec(run, {}))); };
  EXPECT_EQ(bytes(), 0);
  run.optimizer.offload = true;
  const int64_t states = bytes();
  const double parameters = static_cast<double>(run.model.num_parameters());
  EXPECT_GT(static_cast<double>(states), 11 * parameters) << "a gate has no master beside it";
  EXPECT_LT(static_cast<double>(states), 12 * parameters + 100 * MemoryPlan::kAlign * 4);
  run.optimizer.grad = GradFormat::bf16;
  run.optimizer.offload_grad = true;
  const int64_t with_sums = bytes();
  EXPECT_GT(with_sums, states);
  run.offload_weights = true;
  EXPECT_GT(bytes(), with_sums);
  run.train.freeze = {"model.layers.*"};  // no update reads these
  const int64_t with_frozen = bytes();
  run.offload_weights = false;
  EXPECT_NEAR(with_frozen, bytes(), 100 * MemoryPlan::kAlign * 4) << "without the padding of weights";
}

}  // namespace
}  // namespace moebius
