// Runs of several ranks, each a process of mpirun, that are killed, stopped or disturbed. They end
// in time with the right code, and name the rank at fault.
// A run that is started again equals one that was not disturbed.
#include <chrono>
#include <map>

#include "comm/transport/mpi.h"
#include "tests/faults/training_run.h"

namespace moebius {
namespace {

using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

class RankedRuns : public TrainingRuns {
 public:
  using TrainingRuns::TrainingRuns;

  // Starts mpirun with `num_ranks` of moebius_faults.
  pid_t start_ranks(int num_ranks, const std::string& run, const Words& overrides = {},
                    const std::map<int, RankIs>& special = {}) const {
    // By default Open MPI refuses to run as root, which containers do. If there are more ranks than
    // cores, waiting ranks must yield.
    std::string command = "cd " + path("") +
                          " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                          "OMPI_MCA_mpi_yield_when_idle=1 && exec " MOEBIUS_MPIRUN;
    for (int r = 0; r < num_ranks; ++r) {
      const auto it = special.find(r);
      const RankIs is = it == special.end() ? RankIs{} : it->second;
      command += r == 0 ? " -n 1 env" : " : -n 1 env";
      if (!is.fault.empty()) command += " MOEBIUS_FAULT=" + is.fault;
      command += " " + built_program("moebius_faults");
      for (const std::string& word : joined(words_of(run, joined(overrides, is.overrides)), {"--timeout", "4"}))
        command += " '" + word + "'";
    }
    command += " >out 2>err </dev/null";
    return start_forked({}, [&] {
      ::execl("/bin/sh", "sh", "-c", command.c_str(), nullptr);
      MOEBIUS_FAIL(io, "exec sh: {}", errno_text(errno));
    });
  }
  int train_ranks(int num_ranks, const std::string& run, const Words& overrides = {},
                  const std::map<int, RankIs>& special = {}) const {
    return end_of(start_ranks(num_ranks, run, overrides, special));
  }
  int64_t count_in_err(const std::string& text) const {
    int64_t count = 0;
    const std::string all = err();
    for (size_t at = all.find(text); at != all.npos; at = all.find(text, at + 1)) ++count;
    return count;
  }
};

bool over_mpich() { return mpi_version().starts_with("MPICH"); }

class RankedTraining : public testing::TestWithParam<bool> {
 protected:
  RankedRuns runs_{{"run.threads=1", "train.steps=6", "checkpoint.every=2", "train.eval_every=3",
                    "train.eval_batches=2", GetParam() ? "checkpoint.async=true" : "checkpoint.async=false"}};
};
INSTANTIATE_TEST_SUITE_P(Async, RankedTraining, testing::Bool());

// Wherever a rank dies during a save, earlier checkpoints are whole, and the run resumes from them
// bit for bit.
TEST_P(RankedTraining, ARankThatIsKilledInASaveCostsNothing) {
  ASSERT_EQ(runs_.train_ranks(2, "undisturbed"), 0) << runs_.err();
  EXPECT_EQ(runs_.count_in_err("2 ranks of MPI"), 1);
  EXPECT_EQ(CheckpointReader(runs_.newest("undisturbed")).num_ranks(), 2);
  const std::vector<std::pair<int, std::string>> deaths{{1, "checkpoint.mid_shard:200"},
                                                        {1, "checkpoint.after_part:2"},
                                                        {0, "checkpoint.after_shard:2"},
                                                        {0, "checkpoint.mid_manifest:2"},
                                                        {0, "checkpoint.after_rename:2"}};
  for (const auto& [rank, point] : deaths) {
    SCOPED_TRACE(fmt::format("rank {} at {}", rank, point));
    EXPECT_EQ(runs_.train_ranks(2, point, {}, {{rank, {point}}}), 6) << runs_.err();
    EXPECT_EQ(runs_.count_in_err("MPI_ABORT"), 0) << "the ranks have reported already";
    EXPECT_TRUE(verify_checkpoint(runs_.newest(point)).ok());
    ASSERT_EQ(runs_.train_ranks(2, point), 0) << runs_.err();
    runs_.expect_same(point, "undisturbed");
  }
}

TEST_P(RankedTraining, ARankWhoseDiskIsFullEndsAllWithCode4) {
  ASSERT_EQ(runs_.train_ranks(2, "r", {}, {{1, {"checkpoint.mid_shard:200:enospc"}}}), 4) << runs_.err();
  EXPECT_THAT(runs_.err(), HasSubstr("rank 1: checkpoint: save of step "));
  EXPECT_EQ(runs_.count_in_err("No space left on device"), 1);
  EXPECT_TRUE(verify_checkpoint(runs_.newest("r")).ok());
  EXPECT_EQ(runs_.train_ranks(2, "r"), 0) << runs_.err();
}

// Only rank 0 writes the metrics. The other ranks must not wait for it forever.
TEST_P(RankedTraining, AFullDiskUnderTheMetricsEndsAllWithCode4) {
  std::filesystem::create_directory(runs_.path("r"));
  std::filesystem::create_symlink("/dev/full", runs_.path("r/metrics.jsonl"));
  EXPECT_EQ(runs_.train_ranks(2, "r"), 4) << runs_.err();
  EXPECT_EQ(runs_.count_in_err("r/metrics.jsonl: No space left on device"), 1) << runs_.err();
  EXPECT_EQ(runs_.count_in_err("error: "), 1) << runs_.err();
  std::filesystem::remove(runs_.path("r/metrics.jsonl"));
  EXPECT_EQ(runs_.train_ranks(2, "r"), 0) << runs_.err();
}

// The disk is smaller than the output of the run. Whichever write fills it, no partial file stays,
// and the run that is started again comes equally far.
TEST_P(RankedTraining, ADiskThatFillsUpEndsAllWithCode4EachTime) {
  const int status = run_forked({}, [&] {
    std::filesystem::create_directory(runs_.path("r"));
    if (!mount_small(runs_.path("r"), "size=3m")) ::_exit(77);
    for (int start = 0; start < 2; ++start) {
      EXPECT_EQ(runs_.train_ranks(2, "r", {"checkpoint.keep=0", "train.steps=60"}), 4) << runs_.err();
      EXPECT_EQ(runs_.count_in_err("No space left on device"), 1) << runs_.err();
      EXPECT_EQ(runs_.count_in_err("recipe.resolved.toml"), 0) << runs_.err();
      EXPECT_TRUE(verify_checkpoint(runs_.newest("r")).ok());
      for (const auto& entry : std::filesystem::directory_iterator(runs_.path("r/checkpoints")))
        EXPECT_THAT(entry.path().string(), Not(HasSubstr(".tmp-")));
    }
  });
  if (status == 77) GTEST_SKIP() << "this system does not allow a mount";
  EXPECT_EQ(status, 0);
}

class RankedRun : public testing::Test {
 protected:
  RankedRuns runs_{{"run.threads=1", "train.steps=6", "checkpoint.every=2"}};
};

TEST_F(RankedRun, ARankThatIsKilledInAStepIsNamedByTheOthers) {
  ASSERT_EQ(runs_.train_ranks(3, "undisturbed", {"train.global_batch=6"}), 0) << runs_.err();
  EXPECT_EQ(runs_.train_ranks(3, "r", {"train.global_batch=6"}, {{1, {"train.mid_step:4"}}}), 6);
  if (!over_mpich()) {
    const std::string dead = "rank 1 (tp 0, cp 0, dp 1, pp 0, etp 0, ep 0, edp 1)";
    for (const int survivor : {0, 2}) {
      const std::string name = fmt::format("rank {0} (tp 0, cp 0, dp {0}, pp 0, etp 0, ep 0, edp {0})", survivor);
      EXPECT_THAT(runs_.err(),
                  HasSubstr(fmt::format(": {} waits, and the process of {} has ended; did not join: {}\nlast "
                                        "collectives of {}:\n",
                                        name, dead, dead, name)));
      EXPECT_THAT(runs_.err(), testing::ContainsRegex("error: [a-z_]+ [0-9]+ of group "
                                                      "[a-z_]+ \\([a-z0-9]+ x [0-9]+\\): rank " +
                                                      std::to_string(survivor)));
    }
    EXPECT_EQ(runs_.count_in_err(" waits, and the process of "), 2) << runs_.err();
  }
  ASSERT_EQ(runs_.train_ranks(3, "r", {"train.global_batch=6"}), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
}

// The watch of the ranks names the message in which rank 0 waits. What rank 0 throws also has the phase and the layer.
TEST_F(RankedRun, ARankThatIsKilledInAPhaseOfExpertsIsNamedWithPhaseAndLayer) {
  if (over_mpich()) GTEST_SKIP() << "its launcher ends all ranks at once";
  // The fourth micro-batch is the second of the second step. In the first one rank 0 would wait for weights.
  const std::map<int, RankIs> killed{{1, {.fault = "train.mid_step:4", .overrides = {}}}};
  const std::string end = "the process of rank 1 \\(.*\\) has ended; did not join: rank 1 ";
  const Words two_level{"train.global_batch=8", "parallel.ep=2", "parallel.dispatcher=\"two_level\"",
                        "parallel.ranks_per_node=1"};
  EXPECT_EQ(runs_.train_ranks(2, "two_level", two_level, killed), 6);
  EXPECT_THAT(runs_.err(), testing::ContainsRegex("error: [a-z_() ]+ of model\\.layers\\.[0-9]+\\.mlp, across nodes: .*"
                                                  "rank 0 \\(.*\\) waits, and " +
                                                  end));
  EXPECT_EQ(runs_.train_ranks(2, "direct", {"train.global_batch=8", "parallel.ep=2", "parallel.dispatcher=\"direct\""},
                              killed),
            6);
  EXPECT_THAT(runs_.err(),
              testing::ContainsRegex("error: [a-z_() ]+ of model\\.layers\\.[0-9]+\\.mlp: rank 0 .*and [0-9]+ "
                                     "was seen; rank 0 \\(.*\\) waits, and " +
                                     end));
}

TEST_F(RankedRun, ARankThatThrowsInAStepEndsAllWithCode6) {
  EXPECT_EQ(runs_.train_ranks(2, "r", {}, {{1, {"train.mid_step:4:throw"}}}), 6) << runs_.err();
  EXPECT_THAT(runs_.err(),
              HasSubstr("error: rank 1 (tp 0, cp 0, dp 1, pp 0, etp 0, ep 0, edp 1) threw, and others did not: "
                        "train.mid_step: Input/output error (a test's fault)\nlast collectives of rank 1"));
  EXPECT_EQ(runs_.count_in_err("the process of rank"), 0) << runs_.err();
  EXPECT_EQ(runs_.train_ranks(2, "r"), 0) << runs_.err();
}

TEST_F(RankedRun, AFullDiskUnderTheTraceEndsAllWithCode4) {
  const int status = run_forked({}, [&] {
    std::filesystem::create_directory(runs_.path("full"));
    if (!mount_small(runs_.path("full"), "size=4k")) ::_exit(77);
    std::ofstream(runs_.path("full/others")) << std::string(4096, 'x');
    EXPECT_EQ(runs_.train_ranks(2, "r", {"log.trace=\"full/trace.json\""}), 4) << runs_.err();
    EXPECT_EQ(runs_.count_in_err("No space left on device"), 1) << runs_.err();
    EXPECT_EQ(runs_.count_in_err("error: "), 1) << runs_.err();
    EXPECT_EQ(runs_.train_ranks(2, "r"), 0) << runs_.err();
  });
  if (status == 77) GTEST_SKIP() << "this system does not allow a mount";
  EXPECT_EQ(status, 0);
}

TEST_F(RankedRun, AStoppedProcessIsNamedInTime) {
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(runs_.train_ranks(2, "r", {}, {{1, {"checkpoint.mid_shard:200:stop"}}}), 6) << runs_.err();
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_THAT(runs_.err(), HasSubstr("rank 0 (tp 0, cp 0, dp 0, pp 0, etp 0, ep 0, edp 0) has waited for 4 s; did not "
                                     "join: rank 1 (tp 0, cp 0, dp 1, pp 0, etp 0, ep 0, edp 1)"));
  EXPECT_THAT(runs_.err(), HasSubstr("last collectives of rank 0"));
  EXPECT_EQ(runs_.train_ranks(2, "r"), 0) << runs_.err();
}

// This is before there is a world that could name the rank.
TEST_F(RankedRun, ARankStoppedBeforeMpiInitEndsAllInTime) {
  for (const auto& [point, call] :
       {std::pair{"mpi.init:1:stop", "MPI_Init_thread"}, {"mpi.dup:1:stop", "MPI_Comm_dup"}}) {
    const auto begin = std::chrono::steady_clock::now();
    EXPECT_EQ(runs_.train_ranks(2, "r", {}, {{1, {point}}}), 6) << runs_.err();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
    EXPECT_THAT(runs_.err(), HasSubstr(fmt::format("error: {}: rank 0 (tp 0, cp 0, dp 0, pp 0, etp 0, ep 0, edp 0) has "
                                                   "waited for 4 s for the other ranks, one of which has not joined",
                                                   call)));
  }
}

TEST_F(RankedRun, ASignalSavesOnAllRanksAndEnds) {
  ASSERT_EQ(runs_.train_ranks(2, "undisturbed", {"train.steps=300"}), 0) << runs_.err();
  const pid_t run = runs_.start_ranks(2, "r", {"train.steps=300"});
  runs_.wait_for_lines("r", 3);
  ::kill(run, SIGUSR1);  // mpirun forwards it to the ranks
  EXPECT_EQ(end_of(run), 128 + SIGUSR1) << runs_.err();
  EXPECT_EQ(CheckpointReader(runs_.newest("r")).step(), runs_.last_step("r"));
  EXPECT_EQ(runs_.count_in_err("saved step"), 1) << runs_.err();
  ASSERT_EQ(runs_.train_ranks(2, "r", {"train.steps=300"}), 0) << runs_.err();
  runs_.expect_same("r", "undisturbed");
}

TEST_F(RankedRun, AnErrorOnEveryRankIsReportedOnceWithItsCode) {
  EXPECT_EQ(runs_.train_ranks(2, "r", {"optimizer.weight_decy=1"}), 2);
  EXPECT_EQ(runs_.count_in_err("unknown key optimizer.weight_decy"), 1);
  EXPECT_EQ(runs_.train_ranks(2, "r", {"data.train=[\"nowhere\"]"}), 3);
  EXPECT_EQ(runs_.count_in_err("error: "), 1) << runs_.err();
  EXPECT_EQ(runs_.train_ranks(2, "r", {"parallel.tp=3"}), 2);
  EXPECT_THAT(runs_.err(), HasSubstr("tp * cp * pp = 3 * 1 * 1; got 2;"));
  EXPECT_EQ(runs_.train_ranks(2, "mad", {"optimizer.lr=1e30", "optimizer.min_lr=1e30", "optimizer.warmup_steps=0"}), 5)
      << runs_.err();
  EXPECT_EQ(runs_.count_in_err("first not finite: "), 1) << runs_.err();
}

TEST_F(RankedRun, RanksThatWereGivenOtherRecipesDoNotBegin) {
  EXPECT_EQ(runs_.train_ranks(3, "r", {"train.global_batch=6"}, {{2, {.overrides = {"optimizer.lr=0.5"}}}}), 2);
  EXPECT_THAT(runs_.err(), HasSubstr("the ranks do not agree on the recipe: ranks 0, 1 against rank 2; line "));
  EXPECT_THAT(runs_.err(), HasSubstr("of rank 2 \"lr = 0.5\""));
  EXPECT_EQ(runs_.count_in_err("error: "), 1) << runs_.err();
  EXPECT_FALSE(std::filesystem::exists(runs_.path("r")));
}

// A run resumes from the checkpoint of another layout, with the same numbers up to the
// order of sums.
TEST_F(RankedRun, ResumesOnAnotherNumberOfRanks) {
  ASSERT_EQ(runs_.train("alone"), 0) << runs_.err();
  const auto loss_of = [&](const std::string& run) {
    return nlohmann::json::parse(runs_.metrics(run).back()).at("loss").get<double>();
  };
  for (const auto& [first, second] : std::vector<std::pair<int, int>>{{2, 1}, {1, 2}}) {
    const std::string run = fmt::format("{}-then-{}", first, second);
    const auto train = [&](int ranks, const Words& overrides) {
      return ranks == 1 ? runs_.train(run, overrides) : runs_.train_ranks(ranks, run, overrides);
    };
    ASSERT_EQ(train(first,
                    {"train.steps=4", "optimizer.warmup_steps=3", "optimizer.schedule=constant", "optimizer.min_lr=0"}),
              0)
        << runs_.err();
    ASSERT_EQ(train(second,
                    {"train.steps=6", "optimizer.warmup_steps=3", "optimizer.schedule=constant", "optimizer.min_lr=0"}),
              0)
        << runs_.err();
    EXPECT_THAT(runs_.err(), HasSubstr("resumed from "));
  }
  EXPECT_NEAR(loss_of("2-then-1"), loss_of("1-then-2"), 1e-4);
}

TEST_F(RankedRun, ThreadsGiveTheResultsOfProcesses) {
  ASSERT_EQ(runs_.train_ranks(2, "processes"), 0) << runs_.err();
  ASSERT_EQ(end_of(start_program(runs_.path(""), joined(runs_.words_of("threads"), {"--ranks", "2"}))), 0)
      << runs_.err();
  EXPECT_THAT(runs_.err(), HasSubstr("2 ranks, threads of this process, 1 CPU threads each"));
  runs_.expect_same("threads", "processes");
}

}  // namespace
}  // namespace moebius
