// Ranks on several hosts, over links that are slow, lose packets, stand still or are cut.
#include <chrono>
#include <sstream>

#include "tests/hosts/on_hosts.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::ContainsRegex;
using testing::Each;
using testing::HasSubstr;

class OnHosts : public testing::Test {
 protected:
  explicit OnHosts(int num_hosts = 2) : network_(num_hosts) {}
  void SetUp() override {
    if (!network_.why_missing().empty()) GTEST_SKIP() << "no hosts on this system: " << network_.why_missing();
  }
  // The processes of the hosts end with the ranks.
  void expect_nothing_runs() const {
    for (int i = 0; i < 2000 && !network_.processes().empty(); ++i) ::usleep(1000);
    EXPECT_TRUE(network_.processes().empty());
  }
  Network network_;
};

// --- the same model -------------------------------------------------------------------------------------------------

struct LayoutsOf {
  int hosts, ranks;
  const char* layouts;  // rows of tests/distributed/layouts_test.cc
  int count;
};

class LayoutsOnHosts : public testing::TestWithParam<Launcher> {};
INSTANTIATE_TEST_SUITE_P(Of, LayoutsOnHosts, testing::Values(Launcher::mpirun, Launcher::variables), name_of_launcher);

TEST_P(LayoutsOnHosts, TrainTheModelOfOneRank) {
  if (GetParam() == Launcher::mpirun && !mpi_version().starts_with("Open MPI")) GTEST_SKIP() << "needs Open MPI";
  const LayoutsOf kWays[] = {{2, 4, "cp2_alltoall_pp2:tp2_dp2:ep4_alltoall", 3}, {4, 8, "tp2_cp2_ep4_pp2", 1}};
  for (const LayoutsOf& way : kWays) {
    Network network(way.hosts);
    if (!network.why_missing().empty()) GTEST_SKIP() << "no hosts on this system: " << network.why_missing();
    network.set_links({.delay_s = 0.0002});
    TestDir dir;
    std::string filters;
    std::istringstream names(way.layouts);
    for (std::string name; std::getline(names, name, ':');)
      filters += fmt::format("{}Everywhere/Layouts.TrainTheSameModel/{}_on_{}", filters.empty() ? "" : ":", name, way.ranks);
    const RanksProgram program{.path = kTestProgram.parent_path() / "tests_distributed",
                               .words = {"--gtest_filter=" + filters},
                               .dir = dir.path()};
    EXPECT_THAT(RanksOnHosts(network, way.ranks).run(GetParam(), program), Each(0)) << read_file(dir.path("err-0"));
    EXPECT_THAT(read_file(dir.path("out-0")), HasSubstr(fmt::format("[  PASSED  ] {} test", way.count)));
    EXPECT_GT(network.sent_bytes(0, 1), 100000);
  }
}

// --- training -------------------------------------------------------------------------------------------------------

class TrainingOnHosts : public OnHosts {
 protected:
  explicit TrainingOnHosts(int num_hosts = 2, int num_ranks = 4) : OnHosts(num_hosts), ranks_(network_, num_ranks) {}
  RanksProgram program_of(const std::string& run, const Words& overrides = {}, int timeout_s = 60) const {
    return {.path = built_program("moebius_faults"),
            .words = joined(runs_.words_of(run, overrides), {"--timeout", std::to_string(timeout_s)}),
            .dir = runs_.path("")};
  }
  std::string err_of(int rank) const { return read_file(runs_.path(fmt::format("err-{}", rank))); }
  // The same run on ranks that are threads.
  void train_on_threads(int num_ranks, const std::string& run, const Words& overrides) const {
    const Words words = joined(runs_.words_of(run, overrides), {"--ranks", std::to_string(num_ranks)});
    ASSERT_EQ(end_of(start_program(runs_.path(""), words)), 0) << runs_.err();
  }
  TrainingRuns runs_{{"run.threads=1", "train.steps=6", "checkpoint.every=3", "train.global_batch=12",
                      "train.micro_batch=1"}};
  RanksOnHosts ranks_;
};

class StartsOnHosts : public TrainingOnHosts, public testing::WithParamInterface<Launcher> {};
INSTANTIATE_TEST_SUITE_P(By, StartsOnHosts,
                         testing::Values(Launcher::mpirun, Launcher::torchrun, Launcher::variables), name_of_launcher);

// The links are slow, and lose packets: no bit is another.
TEST_P(StartsOnHosts, HaveTheBitsOfThreads) {
  if (GetParam() == Launcher::mpirun && !mpi_version().starts_with("Open MPI")) GTEST_SKIP() << "needs Open MPI";
  const Words layout{"parallel.ep=4", "parallel.dispatcher=\"allgather\""};
  train_on_threads(4, "threads", layout);
  network_.set_links({.delay_s = 0.0005, .loss = 0.002});
  EXPECT_THAT(ranks_.run(GetParam(), program_of("hosts", layout)), Each(0)) << err_of(0);
  runs_.expect_same("hosts", "threads");
  expect_nothing_runs();
}

}  // namespace
}  // namespace moebius
