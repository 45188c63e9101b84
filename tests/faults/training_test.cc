// A run that dies and is started again equals, bit for bit, a run that never died:
// metrics and state.
#include <algorithm>
#include <random>

#include "device/accelerator.h"
#include "tests/faults/training_run.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::SizeIs;

struct Setup {
  const char* name;
  Words overrides;
};

void PrintTo(const Setup& setup, std::ostream* out) { *out << setup.name; }

// The setups differ in the state that a run carries from step to step: balance state, dtypes, the
// writing thread.
const std::vector<Setup> kSetups{
    {"F32Async", {"checkpoint.async=true", "run.threads=1"}},
    {"Bf16BiasSync",
     {"checkpoint.async=false", "run.threads=1", "precision.compute=bf16", "moe.balance=bias", "moe.aux_coeff=0"}},
    {"GlobalAuxJitterCapacity",
     {"checkpoint.async=true", "run.threads=1", "moe.balance=[\"global_aux\", \"seq_aux\"]", "moe.jitter=0.1",
      "moe.capacity_factor=1.0", "data.separate_documents=true"}},
};

class Training : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override { ASSERT_EQ(runs_.train("undisturbed"), 0) << runs_.err(); }

  TrainingRuns runs_{joined(GetParam().overrides,
                            {"train.steps=7", "checkpoint.every=2", "train.eval_every=3", "train.eval_batches=2"})};
};
INSTANTIATE_TEST_SUITE_P(All, Training, testing::ValuesIn(kSetups), [](const auto& info) { return info.param.name; });

TEST_P(Training, ReportsEveryStepOnce) {
  EXPECT_THAT(runs_.metrics("undisturbed"), SizeIs(7 + 3));  // evaluations after 3, 6 and 7
  EXPECT_EQ(runs_.newest("undisturbed"), runs_.path("undisturbed/checkpoints/step-00000007"));
  EXPECT_GT(runs_.state("undisturbed").size(), 90u);  // weights and two moments
  ASSERT_EQ(runs_.train("again", {"run.threads=2"}), 0);
  runs_.expect_same("again", "undisturbed");
  ASSERT_EQ(runs_.train("other", {"run.seed=5"}), 0);  // otherwise the comparison would prove nothing
  EXPECT_NE(runs_.metrics("other"), runs_.metrics("undisturbed"));
  EXPECT_NE(runs_.state("other"), runs_.state("undisturbed"));
}

TEST_P(Training, EvaluationChangesNothing) {
  ASSERT_EQ(runs_.train("without", {"train.eval_every=100"}), 0);
  std::vector<std::string> with = runs_.metrics("undisturbed"), without = runs_.metrics("without");
  const auto is_eval = [](const std::string& record) { return record.find("\"eval\"") != record.npos; };
  EXPECT_EQ(std::erase_if(with, is_eval), 3);
  EXPECT_EQ(std::erase_if(without, is_eval), 1);
  EXPECT_EQ(with, without);
  EXPECT_TRUE(runs_.state("without") == runs_.state("undisturbed"));
}

TEST_P(Training, AFinishedRunHasNothingToDo) {
  const std::vector<std::string> before = runs_.metrics("undisturbed");
  EXPECT_EQ(runs_.train("undisturbed"), 0);
  EXPECT_THAT(runs_.err(), HasSubstr("nothing to do"));
  EXPECT_EQ(runs_.metrics("undisturbed"), before);
}

// Returns, for each fault point of a save, three of its hits in the whole run: the first, one in
// the middle and the last.
Words points_to_try(const TrainingRuns& runs) {
  EXPECT_EQ(runs.train("logged", {}, {.log = runs.path("log")}), 0);
  std::map<std::string, int> hits;
  std::ifstream log(runs.path("log"));
  for (std::string name; std::getline(log, name);) ++hits[name];
  Words points;
  for (const auto& [name, count] : hits) {
    for (const int hit : {1, (count + 1) / 2, count}) points.push_back(fmt::format("{}:{}", name, hit));
  }
  std::sort(points.begin(), points.end());
  points.erase(std::unique(points.begin(), points.end()), points.end());
  return points;
}

TEST_P(Training, KilledAtEveryPointOfASave) {
  const Words points = points_to_try(runs_);
  EXPECT_GT(points.size(), 20u);
  for (const std::string& point : points) {
    SCOPED_TRACE(point);
    ASSERT_EQ(runs_.train(point, {}, {.fault = point}), kKilled) << runs_.err();
    ASSERT_EQ(runs_.train(point), 0) << runs_.err();
    runs_.expect_same(point, "undisturbed");
  }
}

TEST_P(Training, ASaveThatFailsEndsTheRunWithCode4AndLosesNothing) {
  for (const std::string point : {"checkpoint.mid_shard:150", "checkpoint.mid_manifest:2", "checkpoint.mid_prune:1"}) {
    for (const std::string mode : {":throw", ":enospc"}) {
      SCOPED_TRACE(point + mode);
      const std::string run = point + mode;
      ASSERT_EQ(runs_.train(run, {}, {.fault = run}), 4) << runs_.err();
      EXPECT_THAT(runs_.err(), HasSubstr(mode == ":throw" ? "Input/output error" : "No space left on device"));
      ASSERT_EQ(runs_.train(run), 0) << runs_.err();
      runs_.expect_same(run, "undisturbed");
    }
  }
}

// Memory may run out where JSON is released, whose destructor cannot throw.
TEST_P(Training, ASaveWithoutMemoryEndsTheRunWithCode2AndLosesNothing) {
  for (const std::string mode : {":nomem", ":nomem_noexcept"}) {
    const std::string run = "checkpoint.mid_manifest:2" + mode;
    SCOPED_TRACE(run);
    ASSERT_EQ(runs_.train(run, {}, {.fault = run}), 2) << runs_.err();
    EXPECT_THAT(runs_.err(),
                HasSubstr(mode == ":nomem" ? "error: checkpoint: save of step 4, " : "error: out of memory; "));
    EXPECT_THAT(runs_.err(), HasSubstr("(ulimit -v, those of the container)"));
    ASSERT_EQ(runs_.train(run), 0) << runs_.err();
    runs_.expect_same(run, "undisturbed");
  }
}

TEST_P(Training, ADamagedNewestCheckpointIsSkippedWithAWarning) {
  ASSERT_EQ(runs_.train("r", {}, {.fault = "checkpoint.after_rename:3"}), kKilled);
  const std::string newest = runs_.newest("r");
  EXPECT_THAT(newest, HasSubstr("step-00000006"));
  std::filesystem::resize_file(newest + "/shard-00000.safetensors", 1000);
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  EXPECT_THAT(runs_.err(), HasSubstr("passed over: checkpoint "));
  EXPECT_THAT(runs_.err(), HasSubstr("step-00000004"));
  runs_.expect_same("r", "undisturbed");
}

TEST_P(Training, AFlippedBitMakesTheRunUseTheCheckpointBefore) {
  ASSERT_EQ(runs_.train("r", {}, {.fault = "checkpoint.after_rename:3"}), kKilled);
  const std::string shard = runs_.newest("r") + "/shard-00000.safetensors";
  std::string contents = read_file(shard);
  contents[contents.size() / 2] ^= 4;
  write_file_atomic(shard, contents);
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  EXPECT_THAT(runs_.err(), HasSubstr("passed over: "));
  EXPECT_THAT(runs_.err(), HasSubstr(shard.substr(runs_.path("").size())));
  runs_.expect_same("r", "undisturbed");
}

// The checkpoints of an earlier run must not come back, wherever the new run dies.
TEST_P(Training, StartingOverNeverUsesEarlierCheckpoints) {
  ASSERT_EQ(runs_.train("r", {"run.seed=5"}), 0);
  ASSERT_EQ(runs_.train("r", {"checkpoint.resume=false"}, {.fault = "checkpoint.before_rename:2"}), kKilled);
  EXPECT_THAT(runs_.newest("r"), HasSubstr("step-00000002"));
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
  const std::string old = runs_.path("r/checkpoints/old-1");  // nothing of it was lost on the way
  EXPECT_EQ(CheckpointReader(old + "/step-00000007").step(), 7);
  EXPECT_TRUE(verify_checkpoint(old + "/step-00000007").ok());
  EXPECT_THAT(read_file(old + "/metrics.jsonl"), HasSubstr("\"step\":7,"));
}

TEST_P(Training, DyingWhileCheckpointsAreSetAsideLosesNone) {
  ASSERT_EQ(runs_.train("r", {"checkpoint.keep=0"}), 0);
  const size_t before = list_checkpoints(runs_.path("r/checkpoints")).size();
  ASSERT_GT(before, 1u);
  ASSERT_EQ(runs_.train("r", {"checkpoint.resume=false"}, {.fault = "checkpoint.mid_set_aside:1"}), kKilled);
  EXPECT_EQ(list_checkpoints(runs_.path("r/checkpoints")).size(), before - 1);
  EXPECT_EQ(list_checkpoints(runs_.path("r/checkpoints/old-1")).size(), 1u);
  ASSERT_EQ(runs_.train("r", {"checkpoint.resume=false"}), 0) << runs_.err();
  EXPECT_EQ(list_checkpoints(runs_.path("r/checkpoints/old-1")).size(), 1u);
  EXPECT_EQ(list_checkpoints(runs_.path("r/checkpoints/old-2")).size(), before - 1);
  runs_.expect_same("r", "undisturbed");
}

// The run dies before its first checkpoint. A restart must not resume from the run
// that it replaces.
TEST_P(Training, ARunThatStartedOverAndDiedDoesNotResumeTheOldOne) {
  ASSERT_EQ(runs_.train("r", {"run.seed=5"}), 0);
  ASSERT_EQ(runs_.train("r", {"checkpoint.resume=false"}, {.fault = "checkpoint.after_mkdir:1"}), kKilled);
  EXPECT_EQ(runs_.newest("r"), "");
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
}

// The signal comes during a long evaluation. The run saves and ends, and the next run does the
// evaluation again.
TEST_P(Training, SigtermDuringAnEvaluationLosesNothing) {
  const Words long_evals{"train.eval_batches=0"};
  ASSERT_EQ(runs_.train("long", long_evals), 0) << runs_.err();
  const pid_t run = runs_.start("r", long_evals);
  runs_.wait_for_lines("r", 3);
  ::kill(run, SIGTERM);
  ASSERT_EQ(end_of(run), 128 + SIGTERM) << runs_.err();
  EXPECT_EQ(CheckpointReader(runs_.newest("r")).step(), runs_.last_step("r"));
  ASSERT_EQ(runs_.train("r", long_evals), 0) << runs_.err();
  runs_.expect_same("r", "long");
}

// These runs are long enough for a signal to meet them.
class LongTraining : public testing::TestWithParam<Setup> {
 protected:
  void SetUp() override { ASSERT_EQ(runs_.train("undisturbed"), 0) << runs_.err(); }

  TrainingRuns runs_{joined(GetParam().overrides,
                            {"train.steps=300", "checkpoint.every=5", "train.eval_every=40", "train.eval_batches=2"})};
};
INSTANTIATE_TEST_SUITE_P(All, LongTraining, testing::ValuesIn(kSetups),
                         [](const auto& info) { return info.param.name; });

TEST_P(LongTraining, KilledRepeatedlyAtRandomTimes) {
  std::mt19937 random(11);
  int num_killed = 0, end = kKilled;
  for (int round = 0; round < 12 && end == kKilled; ++round) {
    const pid_t run = runs_.start("r");
    ::usleep(5'000 + random() % 80'000);
    ::kill(run, SIGKILL);
    end = end_of(run);
    num_killed += end == kKilled;
  }
  EXPECT_GT(num_killed, 0);
  EXPECT_TRUE(end == kKilled || end == 0) << runs_.err();
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
}

TEST_P(LongTraining, SigtermSavesTheStepThatIsDoneAndEnds) {
  for (const int64_t lines : {3, 12}) {
    const pid_t run = runs_.start("r");
    runs_.wait_for_lines("r", lines);
    ::kill(run, SIGTERM);
    ASSERT_EQ(end_of(run), 128 + SIGTERM) << runs_.err();
    EXPECT_EQ(CheckpointReader(runs_.newest("r")).step(), runs_.last_step("r"));
    EXPECT_THAT(runs_.err(), HasSubstr("saved step"));
  }
  ASSERT_EQ(runs_.train("r"), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
}

TEST_P(LongTraining, ASecondRunInTheSameFolderIsRefused) {
  const pid_t first = runs_.start("r", {"train.steps=1000000"});
  runs_.wait_for_lines("r", 1);
  EXPECT_EQ(runs_.train("r"), 2);
  EXPECT_THAT(runs_.err(), HasSubstr(fmt::format("got a second one besides process {} on ", first)));
  ::kill(first, SIGKILL);
  EXPECT_EQ(end_of(first), kKilled);
}

// The same on a GPU. A save reads back every bit and a resume uploads it, with a copy of all state
// or in pieces, whichever kernels compute.
class TrainingOnGpu : public testing::TestWithParam<Setup> {};

TEST_P(TrainingOnGpu, KilledAfterASaveResumesWithTheSameBits) {
  const std::string why = Accelerator::why_missing();
  if (!why.empty()) GTEST_SKIP() << why;
  const TrainingRuns runs(
      joined(GetParam().overrides, {"run.device=cuda", "precision.compute=bf16", "train.steps=7", "checkpoint.every=2",
                                    "train.eval_every=3", "train.eval_batches=2"}));
  ASSERT_EQ(runs.train("undisturbed"), 0) << runs.err();
  ASSERT_EQ(runs.train("killed", {}, {.fault = "checkpoint.after_rename:2"}), kKilled) << runs.err();
  ASSERT_EQ(runs.train("killed"), 0) << runs.err();
  runs.expect_same("killed", "undisturbed");
}

const std::vector<Setup> kOnGpu{
    {"async_auto", {"checkpoint.async=true", "run.kernels=auto"}},
    {"sync_auto", {"checkpoint.async=false", "run.kernels=auto"}},
    {"async_portable", {"checkpoint.async=true", "run.kernels=portable"}},
    {"sync_portable", {"checkpoint.async=false", "run.kernels=portable"}},
};
INSTANTIATE_TEST_SUITE_P(Ways, TrainingOnGpu, testing::ValuesIn(kOnGpu),
                         [](const auto& info) { return info.param.name; });

// Where only some programs of a build are at hand, the cause must not be lost.
TEST(StartProgram, NamesTheProgramThatCannotBeStarted) {
  const TestDir dir;
  const std::string program = dir.path("no_program");
  EXPECT_EQ(end_of(start_program(program, dir.path(), {"train"}, {}, {})), kNotStarted);
  EXPECT_EQ(read_file(dir.path("err")),
            program + " cannot be started: No such file or directory; it belongs to the build of this test\n");
}

}  // namespace
}  // namespace moebius
