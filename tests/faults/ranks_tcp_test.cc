// Runs of several ranks, each a process with the variables of torchrun, that are killed, stopped or
// disturbed. The remaining ranks end in time with the right code, and name the rank at fault.
// A run that is started again equals one that was not disturbed.
#include <sys/resource.h>

#include <chrono>

#include "comm/transport/reserved_port_testing.h"
#include "tests/faults/training_run.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::Each;
using testing::HasSubstr;

// Exit codes by rank.
using Codes = std::vector<int>;
using Special = std::map<int, RankIs>;

class TcpRuns : public TrainingRuns {
 public:
  using TrainingRuns::TrainingRuns;

  std::vector<pid_t> start_ranks(int num_ranks, const std::string& run, const Special& special = {},
                                 int timeout_s = 60) const {
    std::vector<pid_t> processes;
    for (int r = 0; r < num_ranks; ++r) {
      const auto it = special.find(r);
      const RankIs is = it == special.end() ? RankIs{} : it->second;
      Surroundings around{.environment = {{"RANK", std::to_string(r)},
                                          {"WORLD_SIZE", std::to_string(num_ranks)},
                                          {"MASTER_ADDR", "127.0.0.1"},
                                          {"MASTER_PORT", std::to_string(port_.number())}},
                          .out = fmt::format("out-{}", r),
                          .err = fmt::format("err-{}", r)};
      around.environment.insert(is.environment.begin(), is.environment.end());
      const Words words = joined(words_of(run, is.overrides), {"--timeout", std::to_string(timeout_s)});
      processes.push_back(start_program(path(is.dir), words, {.fault = is.fault, .log = {}}, around));
    }
    return processes;
  }
  Codes train_ranks(int num_ranks, const std::string& run, const Special& special = {}) const {
    Codes codes;
    for (const pid_t process : start_ranks(num_ranks, run, special)) codes.push_back(end_of(process));
    return codes;
  }
  std::string err_of(int rank) const { return read_file(path(fmt::format("err-{}", rank))); }

 private:
  ReservedPort port_;  // of rank 0, in every run
};

std::string name_of(int rank) { return fmt::format("rank {0} (tp 0, cp 0, dp {0}, pp 0, etp 0, ep 0, edp {0})", rank); }

// The report begins with the collective that the rank waits for.
auto BeginsWithCollectiveOf(int rank) {
  return ContainsRegex("error: [a-z_]+ [0-9]+ of group [a-z_]+ \\([a-z0-9]+ x [0-9]+\\): rank " + std::to_string(rank));
}

class TcpRun : public testing::Test {
 protected:
  TcpRuns runs_{{"run.threads=1", "train.steps=6", "checkpoint.every=2", "train.global_batch=12"}};
};

// With three ranks, the fourth micro-batch of a rank is the second of its second step.
TEST_F(TcpRun, ARankThatIsKilledInAStepIsNamedByTheOthers) {
  ASSERT_THAT(runs_.train_ranks(3, "undisturbed"), Each(0)) << runs_.err_of(0);
  EXPECT_EQ(runs_.train_ranks(3, "r", {{1, {"train.mid_step:4"}}}), (Codes{6, kKilled, 6}));
  for (const int survivor : {0, 2}) {
    EXPECT_THAT(runs_.err_of(survivor), BeginsWithCollectiveOf(survivor));
    EXPECT_THAT(
        runs_.err_of(survivor),
        HasSubstr(fmt::format("{} waits, and the connection to {} broke: its process has ended; did not join: {}\n"
                              "last collectives of {}:\n",
                              name_of(survivor), name_of(1), name_of(1), name_of(survivor))));
  }
  ASSERT_THAT(runs_.train_ranks(3, "r"), Each(0)) << runs_.err_of(0);
  runs_.expect_same("r", "undisturbed");
}

TEST_F(TcpRun, ARankThatIsStoppedInAStepIsNamedInTime) {
  const auto begin = std::chrono::steady_clock::now();
  const std::vector<pid_t> ranks = runs_.start_ranks(2, "r", {{1, {"train.mid_step:4:stop"}}}, /*timeout_s=*/6);
  EXPECT_EQ(end_of(ranks[0]), 6) << runs_.err_of(0);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(60));
  EXPECT_THAT(runs_.err_of(0), BeginsWithCollectiveOf(0));
  EXPECT_THAT(runs_.err_of(0), HasSubstr(fmt::format("{} has waited for 6 s; did not join: {}\nlast collectives of {}",
                                                     name_of(0), name_of(1), name_of(0))));
  ::kill(ranks[1], SIGCONT);  // it finds that the others have ended
  EXPECT_EQ(end_of(ranks[1]), 6) << runs_.err_of(1);
  EXPECT_THAT(runs_.train_ranks(2, "r"), Each(0)) << runs_.err_of(0);
}

// Rank 0 waits in the memory that the ranks share, where no message comes. Rank 1 ends before the second micro-batch of
// the second step; in the first one rank 0 would wait for weights.
TEST_F(TcpRun, ARankThatEndsInAOneSidedPhaseIsNamedWithPhaseLayerAndRounds) {
  const Words direct{"parallel.ep=2", "parallel.dispatcher=\"direct\""};
  const auto train = [&](const std::string& run, const std::string& fault, int timeout_s) {
    return runs_.start_ranks(2, run, {{0, {.fault = {}, .overrides = direct}}, {1, {fault, direct}}}, timeout_s);
  };
  const std::string round =
      " of model\\.layers\\.[0-9]+\\.mlp: rank 0 .* rank 1 .*round [0-9]+ of group [a-z_]+ is "
      "expected of it, and [0-9]+ was seen";
  const std::vector<pid_t> killed = train("killed", "train.mid_step:5", 60);
  EXPECT_EQ(end_of(killed[0]), 6);
  EXPECT_EQ(end_of(killed[1]), kKilled);
  EXPECT_THAT(runs_.err_of(0), ContainsRegex("error: [a-z_() ]+" + round));
  EXPECT_THAT(runs_.err_of(0), HasSubstr("broke: its process has ended; did not join: rank 1"));
  const std::vector<pid_t> stopped = train("stopped", "train.mid_step:5:stop", 6);
  EXPECT_EQ(end_of(stopped[0]), 6);
  EXPECT_THAT(runs_.err_of(0), ContainsRegex("error: [a-z_() ]+" + round));
  EXPECT_THAT(runs_.err_of(0), HasSubstr("has waited for 6 s for rank 1"));
  ::kill(stopped[1], SIGCONT);
  EXPECT_EQ(end_of(stopped[1]), 6);
}

// While it lives, processes that are started may not make files above this size. Those in memory count too.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    EXPECT_EQ(::getrlimit(RLIMIT_FSIZE, &before_), 0);
    const struct rlimit small { bytes, before_.rlim_max };
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &small), 0);
  }
  ~FileSizeLimit() { ::setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;

 private:
  struct rlimit before_ {};
};

// The limit allows memory of 2 MiB, and the window of this run is larger. The results of all-gather are those of direct.
TEST_F(TcpRun, AWindowThatCannotBeMadeIsReplacedOrRefused) {
  const Words large{"parallel.ep=2", "train.micro_batch=64", "train.global_batch=128", "train.seq_len=64"};
  const auto train = [&](const std::string& run, const Words& more) {
    const RankIs is{.fault = {}, .overrides = joined(large, more)};
    return runs_.train_ranks(2, run, {{0, is}, {1, is}});
  };
  ASSERT_THAT(train("undisturbed", {}), Each(0)) << runs_.err_of(0);
  EXPECT_THAT(runs_.err_of(0), HasSubstr("dispatcher direct: chosen by \"auto\" because the 2 ranks"));
  const FileSizeLimit limit(2200 << 10);
  ASSERT_THAT(train("limited", {}), Each(0)) << runs_.err_of(0);
  EXPECT_THAT(runs_.err_of(0),
              ContainsRegex("dispatcher allgather: .*; direct would send the least, but rank 0 .* cannot make memory "
                            "for other ranks: peer memory: a file of [0-9]+ bytes in memory cannot be made: File too "
                            "large; raise the limit of file sizes of this process \\(ulimit -f\\)"));
  runs_.expect_same("limited", "undisturbed");
  ASSERT_THAT(train("undisturbed", {"train.steps=7"}), Each(0)) << runs_.err_of(0);
  EXPECT_THAT(runs_.err_of(0), HasSubstr("parallel.dispatcher = \"auto\" was direct up to step 6 and is allgather from "
                                         "there on, with the same bits"));
  EXPECT_THAT(train("named", {"parallel.dispatcher=\"direct\""}), Each(2)) << runs_.err_of(0);
  EXPECT_THAT(runs_.err_of(0), HasSubstr("File too large; raise the limit of file sizes of this process (ulimit -f)"));
}

// Nodes of one rank split the two ranks of an expert, so that two-level is not possible.
TEST_F(TcpRun, AWindowThatCannotBeMadeIsReplacedWhereNodesSplitExperts) {
  const RankIs is{
      .fault = {},
      .overrides = {"parallel.ep=2", "parallel.etp=2", "parallel.ranks_per_node=1", "train.global_batch=8"}};
  const FileSizeLimit limit(1 << 20);
  ASSERT_THAT(runs_.train_ranks(4, "limited", {{0, is}, {1, is}, {2, is}, {3, is}}), Each(0)) << runs_.err_of(0);
  EXPECT_THAT(runs_.err_of(0), HasSubstr("dispatcher allgather: chosen by \"auto\""));
  EXPECT_THAT(runs_.err_of(0), HasSubstr("File too large"));
}

TEST_F(TcpRun, ARankThatThrowsInAStepEndsAllWithCode6) {
  EXPECT_THAT(runs_.train_ranks(3, "r", {{1, {"train.mid_step:4:throw"}}}), Each(6));
  EXPECT_THAT(runs_.err_of(1), HasSubstr("error: " + name_of(1) +
                                         " threw, and others did not: train.mid_step: Input/output error (a test's "
                                         "fault)\nlast collectives of " +
                                         name_of(1)));
  for (const int other : {0, 2}) {
    EXPECT_THAT(runs_.err_of(other),
                HasSubstr(fmt::format("{} is ended, because {} has ended the run: ", name_of(other), name_of(1))));
  }
  EXPECT_THAT(runs_.train_ranks(3, "r"), Each(0)) << runs_.err_of(0);
}

TEST_F(TcpRun, ARankWithoutMemoryNamesTheLimits) {
  EXPECT_THAT(runs_.train_ranks(2, "r", {{1, {"train.mid_step:4:nomem"}}}), Each(6));
  EXPECT_THAT(runs_.err_of(1), HasSubstr(" threw, and others did not: out of memory; raise the memory limits of "
                                         "this rank (ulimit -v, those of the container)\n"));
}

TEST_F(TcpRun, ARankWhoseDiskIsFullEndsAllWithCode4) {
  EXPECT_THAT(runs_.train_ranks(2, "r", {{1, {"checkpoint.mid_shard:200:enospc"}}}), Each(4));
  EXPECT_THAT(runs_.err_of(0),
              AllOf(HasSubstr("rank 1: checkpoint: save of step "), HasSubstr("No space left on device")));
  EXPECT_THAT(runs_.train_ranks(2, "r"), Each(0)) << runs_.err_of(0);
}

// Rank 1 runs in a folder that has the data, but not the run folder of rank 0.
TEST_F(TcpRun, ARunFolderThatRanksDoNotShareIsRefused) {
  std::filesystem::create_directory(runs_.path("away"));
  for (const char* file : {"data.bin", "data.idx", "data.json"})
    std::filesystem::create_symlink(runs_.path(file), runs_.path("away/") + file);
  ASSERT_THAT(runs_.train_ranks(2, "r", {}), Each(0)) << runs_.err_of(0);
  for (const char* run : {"new", "r"}) {
    EXPECT_THAT(runs_.train_ranks(2, run, {{1, {.fault = {}, .dir = "away"}}}), Each(2));
    EXPECT_THAT(runs_.err_of(0), HasSubstr(fmt::format("error: rank 1: checkpoint: expected {}/checkpoints/lock to be "
                                                       "that of rank 0; got ",
                                                       run)));
  }
  EXPECT_THAT(runs_.newest("r"), HasSubstr("step-00000006"));
}

// Rank 1 runs in a folder that has the run folder, but lacks one of the datasets.
TEST_F(TcpRun, ADatasetThatOneRankLacksEndsAllWithCode3) {
  std::filesystem::create_directory(runs_.path("away"));
  std::filesystem::create_directory_symlink(runs_.path("r"), runs_.path("away/r"));
  for (const char* file : {"data.bin", "data.idx", "data.json"}) {
    std::filesystem::copy_file(runs_.path(file), runs_.path("valid") + (file + 4));
    std::filesystem::create_symlink(runs_.path("valid") + (file + 4), runs_.path("away/valid") + (file + 4));
  }
  const auto train = [&](const Words& overrides) {
    return runs_.train_ranks(2, "r", {{0, {.fault = {}, .overrides = overrides}}, {1, {{}, overrides, "away"}}});
  };
  EXPECT_THAT(train({}), Each(3));
  EXPECT_THAT(runs_.err_of(0), HasSubstr("error: rank 1: data.train: data: "
                                         "expected data.bin and data.idx; data.bin is not there"));
  EXPECT_THAT(train({"data.train=[\"valid\"]"}), Each(3));
  EXPECT_THAT(runs_.err_of(0), HasSubstr("error: rank 1: data.valid: data: expected data.bin"));
  EXPECT_THAT(train({"data.train=[\"valid\"]", "data.valid=[\"valid\"]"}), Each(0)) << runs_.err_of(0);
}

TEST_F(TcpRun, RanksThatWereGivenOtherRecipesDoNotBegin) {
  EXPECT_THAT(runs_.train_ranks(3, "r", {{2, {.fault = {}, .overrides = {"optimizer.lr=0.5"}}}}), Each(2));
  EXPECT_THAT(runs_.err_of(0),
              AllOf(HasSubstr("the ranks do not agree on the recipe: ranks 0, 1 against rank 2; line "),
                    HasSubstr("of rank 2 \"lr = 0.5\"")));
  for (const int other : {1, 2})
    EXPECT_THAT(runs_.err_of(other), testing::Not(HasSubstr("error: "))) << "rank 0 reports it";
  EXPECT_FALSE(std::filesystem::exists(runs_.path("r")));
}

// The secret of a rank is in its environment, or in a file that its environment names.
TEST_F(TcpRun, RanksThatAreGivenTheSecretTrain) {
  write_file_atomic(runs_.path("secret"), "0123456789abcdef\n");
  const RankIs by_text{.fault = {}, .environment = {{"MOEBIUS_SECRET", "0123456789abcdef"}}},
      by_file{.fault = {}, .environment = {{"MOEBIUS_SECRET_FILE", "secret"}}};
  EXPECT_THAT(runs_.train_ranks(3, "r", {{0, by_text}, {1, by_file}, {2, by_text}}), Each(0)) << runs_.err_of(0);
  for (const int rank : {0, 1, 2}) EXPECT_THAT(runs_.err_of(rank), testing::Not(HasSubstr("0123456789abcdef")));
}

// Rank 1 has another secret, or none. It ends at once, and rank 0 after the timeout. Both say why.
TEST_F(TcpRun, ARankWithoutTheSecretIsRefusedInTime) {
  const RankIs knows{.fault = {}, .environment = {{"MOEBIUS_SECRET", "0123456789abcdef"}}},
      other{.fault = {}, .environment = {{"MOEBIUS_SECRET", "fedcba9876543210"}}};
  for (const RankIs& rank_1 : {other, RankIs{}}) {
    const auto begin = std::chrono::steady_clock::now();
    const std::vector<pid_t> ranks = runs_.start_ranks(2, "r", {{0, knows}, {1, rank_1}}, /*timeout_s=*/2);
    EXPECT_EQ(end_of(ranks[1]), 6);
    EXPECT_EQ(end_of(ranks[0]), 6);
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
    EXPECT_THAT(runs_.err_of(0),
                AllOf(HasSubstr("warning: tcp: rank 0 has refused a connection from 127.0.0.1, which "),
                      HasSubstr("it calls itself rank 1"), HasSubstr("missing: rank 1")));
    EXPECT_THAT(runs_.err_of(1), HasSubstr("(the rank there does not know the secret of this job)"));
  }
  EXPECT_FALSE(std::filesystem::exists(runs_.path("r")));
}

// Where ranks are threads, the error of a rank is that of the run.
TEST_F(TcpRun, AThreadThatThrowsInAStepEndsAll) {
  const Words words = joined(runs_.words_of("r"), {"--ranks", "2"});
  EXPECT_EQ(end_of(start_program(runs_.path(""), words, {.fault = "train.mid_step:4:throw", .log = {}})), 4)
      << runs_.err();
  EXPECT_THAT(runs_.err(), ContainsRegex("error: rank [01] \\(tp 0, .*\\): train.mid_step: Input/output error"));
}

}  // namespace
}  // namespace moebius
