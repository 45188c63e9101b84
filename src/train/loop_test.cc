#include "train/loop.h"

#include <gtest/gtest.h>

#include "comm/transport/threads.h"
#include "train/testing.h"

namespace moebius {
namespace {

// A step of this tiny model takes far less than a minute. Between steps the limit is the first one again.
TEST(TrainingRun, ShortensTheDefaultTimeoutByTheStepsThatAreDone) {
  const TestDir dir;
  RunSpec run = testing::tiny_run();
  run.dir = dir.path("run");
  run.data.train = {{.prefix = testing::write_dataset(dir, "data", 300)}};
  run.train.steps = 3;
  run.optimizer.lr = 1e-3;
  run.checkpoint.every = 2;
  run.threads = 1;
  const std::atomic<int> no_signal{0};
  run_threads(2, {}, [&](Transport& world) {
    EXPECT_EQ(world.timeout_s(), 600);
    Log quiet(stderr, false, true);
    EXPECT_EQ(TrainingRun(run, quiet, no_signal, &world).run(), 0);
    EXPECT_GT(world.timeout_s(), 60);
    EXPECT_LT(world.timeout_s(), 120);
    const auto between_steps = world.default_timeout().between_steps();
    EXPECT_EQ(world.timeout_s(), 600);
  });
}

}  // namespace
}  // namespace moebius
