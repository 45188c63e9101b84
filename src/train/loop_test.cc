#include "train/loop.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "checkpoint/list.h"
#include "comm/transport/threads.h"
#include "io/files.h"
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

// The step leaves finite weights whose logits overflow. When the evaluation ends the run, the second rank still writes
// its moments, of which it has many.
TEST(TrainingRun, AnEvaluationThatFailsLosesNoCheckpoint) {
  const TestDir dir;
  RunSpec run = testing::tiny_run();
  run.dir = dir.path("run");
  run.data.train = run.data.valid = {{.prefix = testing::write_dataset(dir, "data", 300)}};
  run.model.vocab_size = 500'000;
  run.parallel.pp = 2;
  run.parallel.layout = "Et|L";
  run.train.steps = run.train.eval_batches = run.train.micro_batch = 1;
  run.train.seq_len = 2;
  run.train.freeze = {"model.embed_tokens.weight", "model.layers.*"};
  run.optimizer.lr = 1e36;
  run.optimizer.schedule = LrSchedule::constant;
  run.threads = 1;
  const std::atomic<int> no_signal{0};
  run_threads(2, {}, [&](Transport& world) {
    Log quiet(stderr, false, true);
    expect_error(ErrorKind::numerics, "are not usable; the newest checkpoint is of step 1. Lower",
                 [&] { TrainingRun(run, quiet, no_signal, &world).run(); });
  });
  const std::vector<CheckpointInfo> infos = list_checkpoints(run.dir + "/checkpoints");
  ASSERT_EQ(infos.size(), 1U);
  EXPECT_EQ(infos[0].step, 1);
  EXPECT_EQ(infos[0].problem, "");
}

// A threshold that no logit reaches must not look like one that works.
TEST(TrainingRun, LogsWhetherHeadsWereClipped) {
  const TestDir dir;
  RunSpec run = testing::tiny_run();
  run.data.train = {{.prefix = testing::write_dataset(dir, "data", 300)}};
  run.train.steps = 3;
  run.optimizer.lr = 1e-3;
  run.threads = 1;
  const auto log_of = [&](double threshold) {
    run.dir = dir.path(fmt::format("run{}", threshold));
    run.optimizer.qk_clip = threshold;
    const std::string path = run.dir + ".log";
    std::FILE* file = std::fopen(path.c_str(), "w");
    Log log(file, false);
    const std::atomic<int> no_signal{0};
    EXPECT_EQ(TrainingRun(run, log, no_signal).run(), 0);
    std::fclose(file);
    return read_file(path);
  };
  EXPECT_THAT(log_of(1000),
              ::testing::HasSubstr("optimizer.qk_clip = 1000: no head was clipped in 3 steps; the largest logit was "));
  EXPECT_THAT(log_of(1e-3), ::testing::HasSubstr("optimizer.qk_clip = 0.001: heads were clipped in "));
  EXPECT_THAT(log_of(0), ::testing::Not(::testing::HasSubstr("qk_clip")));
}

// The signal ends the run after its first step; no disk holds all checkpoints of the steps that were asked for.
TEST(TrainingRun, WarnsBeforeTheFirstStepOfADiskThatIsTooSmall) {
  const TestDir dir;
  RunSpec run = testing::tiny_run();
  run.data.train = {{.prefix = testing::write_dataset(dir, "data", 300)}};
  run.optimizer.lr = 1e-3;
  run.threads = 1;
  run.checkpoint = {.every = 1, .keep = 0};
  const auto log_of = [&](int64_t steps) {
    run.train.steps = steps;
    run.dir = dir.path(fmt::format("run{}", steps));
    const std::string path = run.dir + ".log";
    std::FILE* file = std::fopen(path.c_str(), "w");
    Log log(file, false);
    const std::atomic<int> signal{15};
    EXPECT_EQ(TrainingRun(run, log, signal).run(), 15);
    std::fclose(file);
    return read_file(path);
  };
  EXPECT_THAT(log_of(1'000'000'000),
              ::testing::HasSubstr("and the run adds up to 1000000000 (checkpoint.keep = 0 keeps all): a later save "
                                   "fails and ends the run; free space, keep fewer checkpoints, or choose another"));
  EXPECT_THAT(log_of(2), ::testing::Not(::testing::HasSubstr("fails and ends the run")));
}

}  // namespace
}  // namespace moebius
