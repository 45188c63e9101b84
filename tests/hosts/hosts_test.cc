// Ranks on several hosts, over links that are slow, lose packets, stall or are cut.
#include <chrono>
#include <sstream>

#include "tests/hosts/on_hosts.h"

namespace moebius {
namespace {

using testing::AnyOf;
using testing::ContainsRegex;
using testing::Each;
using testing::HasSubstr;
using testing::Not;

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
  const LayoutsOf kWays[] = {{2, 4, "cp2_alltoall_pp2:ep4_alltoall:ep4_two_level", 3}, {4, 4, "tp2_dp2", 1}};
  for (const LayoutsOf& way : kWays) {
    Network network(way.hosts);
    if (!network.why_missing().empty()) GTEST_SKIP() << "no hosts on this system: " << network.why_missing();
    TestDir dir;
    std::string filters;
    std::istringstream names(way.layouts);
    for (std::string name; std::getline(names, name, ':');)
      filters +=
          fmt::format("{}Everywhere/Layouts.TrainTheSameModel/{}_on_{}", filters.empty() ? "" : ":", name, way.ranks);
    const RanksProgram program{.path = kTestProgram.parent_path() / "tests_distributed",
                               .words = {"--gtest_color=no", "--gtest_filter=" + filters},
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
  TrainingRuns runs_{
      {"run.threads=1", "train.steps=6", "checkpoint.every=3", "train.global_batch=12", "train.micro_batch=1"}};
  RanksOnHosts ranks_;
};

class StartsOnHosts : public TrainingOnHosts, public testing::WithParamInterface<Launcher> {};
INSTANTIATE_TEST_SUITE_P(By, StartsOnHosts, testing::Values(Launcher::mpirun, Launcher::torchrun, Launcher::variables),
                         name_of_launcher);

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

// Returns a machine file whose calls take no time beside that of their bytes, as long messages do.
std::string machine_without_latency() {
  std::string text = read_file(MOEBIUS_SOURCE_DIR "/machines/xeon2.toml");
  for (const std::string figure : {"inside_us = { is = 20", "across_us = { is = 100"}) {
    const size_t at = text.find(figure);
    EXPECT_NE(at, std::string::npos) << figure;
    text.replace(at, figure.size(), figure.substr(0, figure.find("is = ")) + "is = 0");
  }
  return text;
}

// The two ranks of a host reach each other's memory, and those of different hosts do not. Links across are slow.
TEST_P(StartsOnHosts, TakeTheTwoLevelDispatcher) {
  if (GetParam() == Launcher::mpirun && !mpi_version().starts_with("Open MPI")) GTEST_SKIP() << "needs Open MPI";
  const Words layout{"parallel.ep=4", "parallel.ranks_per_node=2"};
  train_on_threads(4, "threads", joined(layout, {"parallel.dispatcher=\"allgather\""}));
  write_file_atomic(runs_.path("machine.toml"), machine_without_latency());
  RanksProgram program = program_of("hosts", layout);
  program.words = joined(program.words, {"--machine", "machine.toml"});
  EXPECT_THAT(ranks_.run(GetParam(), program), Each(0)) << err_of(0);
  EXPECT_THAT(
      read_file(runs_.path("out-0")) + err_of(0),
      HasSubstr("dispatcher two_level: chosen by \"auto\" because the ranks that share experts are on 2 nodes of 2"));
  runs_.expect_same("hosts", "threads");
  expect_nothing_runs();
}

// --- links that stall -----------------------------------------------------------------------------------------------

class Links : public TrainingOnHosts {
 protected:
  Links() : TrainingOnHosts(/*num_hosts=*/3, /*num_ranks=*/3) {}
  // Cuts the link between the hosts of ranks 1 and 2 in the midst of a run.
  std::vector<pid_t> start_and_cut(Launcher launcher, const std::string& run, const Words& overrides, int timeout_s) {
    const std::vector<pid_t> processes = ranks_.start(launcher, program_of(run, overrides, timeout_s));
    runs_.wait_for_lines(run, 2);
    network_.set_link(1, 2, {.is_cut = true});
    return processes;
  }
};

TEST_F(Links, ThatAreCutEndTheRunInTimeAndAreNamed) {
  const std::vector<pid_t> ranks = start_and_cut(Launcher::variables, "r", {"train.steps=100000"}, /*timeout_s=*/3);
  const auto begin = std::chrono::steady_clock::now();
  for (const pid_t rank : ranks) EXPECT_EQ(end_of(rank), 6);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  for (const int r : {0, 1, 2}) {
    if (r == 0) {
      EXPECT_THAT(err_of(r), Not(HasSubstr("the link from"))) << "both its links are well";
    } else {
      EXPECT_THAT(err_of(r), ContainsRegex("has waited for 3 s; did not join: .*rank"));
      EXPECT_THAT(err_of(r), ContainsRegex(fmt::format(
                                 "; {}, the machine of rank {} \\(.*\\), has answered nothing for [0-9.]+ s: "
                                 "it is down, or the link from {} to it is cut\nlast collectives of rank {}",
                                 Network::address(3 - r), 3 - r, Network::address(r), r)));
    }
  }
  expect_nothing_runs();
}

TEST_F(Links, ThatAreCutEndTheRanksOfMpirunInTime) {
  if (!mpi_version().starts_with("Open MPI")) GTEST_SKIP() << "needs Open MPI";
  const std::vector<pid_t> mpirun = start_and_cut(Launcher::mpirun, "r", {"train.steps=100000"}, /*timeout_s=*/3);
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_EQ(end_of(mpirun[0]), 6);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(20));
  EXPECT_THAT(err_of(0), AnyOf(ContainsRegex("error: .*: rank 1 .*did not join: .*rank 2"),
                               ContainsRegex("error: .*: rank 2 .*did not join: .*rank 1")));
  expect_nothing_runs();
}

TEST_F(Links, ThatStallForAWhileChangeNoBit) {
  train_on_threads(3, "threads", {});
  const std::vector<pid_t> ranks = start_and_cut(Launcher::variables, "hosts", {}, /*timeout_s=*/30);
  ::usleep(700000);
  network_.set_links({});
  for (const pid_t rank : ranks) EXPECT_EQ(end_of(rank), 0) << err_of(0);
  runs_.expect_same("hosts", "threads");
}

// The ranks of dp are on two hosts, so their waits show that the link is slow. A sum over
// two ranks is two exchanges, and each takes the delay at least, whichever rank comes first.
TEST_F(TrainingOnHosts, ASlowLinkShowsInTheWaitsByAxis) {
  constexpr double kDelayS = 0.05;
  const auto shortest_waits = [&](double delay_s) {
    const std::string run = fmt::format("r{}", delay_s);
    network_.set_links({.delay_s = delay_s});
    EXPECT_THAT(ranks_.run(Launcher::variables,
                           program_of(run, {"parallel.tp=2", "train.steps=3", "optimizer.warmup_steps=1"})),
                Each(0))
        << err_of(0);
    std::map<std::string, double> waits;  // the shortest of all steps, which no load of the machine makes longer
    std::istringstream lines(read_file(runs_.path(run + "/metrics.jsonl")));
    for (std::string line; std::getline(lines, line);) {
      const auto metrics = nlohmann::json::parse(line);
      if (!metrics.contains("comm")) continue;  // of an evaluation
      for (const auto& [axis, of_axis] : metrics.at("comm").items()) {
        const double wait = of_axis.at("exposed_s").get<double>();
        const auto [at, is_first] = waits.try_emplace(axis, wait);
        at->second = std::min(at->second, wait);
      }
    }
    return waits;
  };
  // A busy machine may make any wait longer, so there is no bound from above.
  std::map<std::string, double> slow = shortest_waits(kDelayS);
  for (const char* across : {"tp_cp_dp", "dp_cp"}) EXPECT_GE(slow[across], 2 * kDelayS) << across;
}

// The ranks of dp are on three hosts. The link between two of them is slow: metrics, log and report name it.
class SlowLinks : public Links {
 protected:
  nlohmann::json links_of(const std::string& run) const {
    std::istringstream lines(read_file(runs_.path(run + "/metrics.jsonl")));
    nlohmann::json links;
    for (std::string line; std::getline(lines, line);) {
      const auto metrics = nlohmann::json::parse(line);
      if (metrics.contains("links")) links = metrics.at("links");
    }
    return links;
  }
  std::string report_of(const std::string& run) const {
    const pid_t report =
        start_program(built_program("moebius"), runs_.path(""), {"report", run, "--out", run + ".html"}, {}, {});
    EXPECT_EQ(end_of(report), 0);
    return read_file(runs_.path(run + ".html"));
  }
  static std::string pair() { return fmt::format("rank 1 ({}) to rank 2 ({})", Network::name(1), Network::name(2)); }
};

TEST_F(SlowLinks, AreNamedByTheirRoundTrip) {
  network_.set_link(1, 2, {.delay_s = 0.05});
  EXPECT_THAT(ranks_.run(Launcher::variables, program_of("r", {"train.steps=12"})), Each(0)) << err_of(0);
  const auto trip = links_of("r").at("round_trip_s");
  EXPECT_EQ(trip.at("ranks").dump(), "[1,2]");
  EXPECT_EQ(trip.at("hosts"), nlohmann::json({Network::name(1), Network::name(2)}));
  EXPECT_GE(trip.at("value").get<double>(), 0.1);
  EXPECT_LT(trip.at("median_of_others").get<double>(), 0.025);
  EXPECT_EQ(trip.at("slow"), true);
  EXPECT_THAT(err_of(0), HasSubstr("warning: a link between ranks is slow: " + pair() + " has a round trip of 10"));
  EXPECT_THAT(err_of(0), HasSubstr("the slowest connection of the last step: " + pair() + " has a round trip of 10"));
  const std::string html = report_of("r");
  EXPECT_THAT(html, HasSubstr(pair()));
  EXPECT_THAT(html, HasSubstr(">slow link<"));
}

// With a vocabulary of this size each link carries some megabytes a step.
TEST_F(SlowLinks, AreNamedByTheirRate) {
  constexpr double kRate = 4e6;
  network_.set_link(1, 2, {.bytes_per_s = kRate});
  EXPECT_THAT(ranks_.run(Launcher::variables,
                         program_of("r", {"train.steps=3", "optimizer.warmup_steps=1", "model.vocab_size=24576"})),
              Each(0))
      << err_of(0);
  const auto rate = links_of("r").at("bytes_per_s");
  EXPECT_EQ(rate.at("ranks").dump(), "[1,2]");
  EXPECT_LT(rate.at("value").get<double>(), 1.5 * kRate);
  EXPECT_GE(rate.at("median_of_others").get<double>(), 4 * rate.at("value").get<double>());
  EXPECT_THAT(err_of(0), HasSubstr(pair() + " has a rate of "));
  EXPECT_THAT(report_of("r"), HasSubstr(">slow link<"));
}

// A link that carries less than half a mebibyte a step. No buffer of the system is full, but its messages take many
// round trips to arrive.
TEST_F(SlowLinks, AreNamedByTheirRateWithLittleTraffic) {
  constexpr double kRate = 1e6;
  network_.set_link(1, 2, {.bytes_per_s = kRate});
  const int64_t before = network_.sent_bytes(1, 2);
  constexpr int kSteps = 14;
  EXPECT_THAT(ranks_.run(Launcher::variables, program_of("r", {fmt::format("train.steps={}", kSteps)})), Each(0))
      << err_of(0);
  EXPECT_LT(network_.sent_bytes(1, 2) - before, kSteps * int64_t{1 << 19}) << "more than little traffic";
  const auto rate = links_of("r").at("bytes_per_s");
  EXPECT_EQ(rate.at("ranks").dump(), "[1,2]");
  EXPECT_LT(rate.at("value").get<double>(), 2 * kRate);
  EXPECT_EQ(rate.at("slow"), true);
  EXPECT_THAT(err_of(0), HasSubstr("warning: a link between ranks is slow: " + pair() + " has a rate of "));
}

TEST_F(Links, ThatAreAlikeAreNotCalledSlow) {
  network_.set_links({.delay_s = 0.01});
  EXPECT_THAT(ranks_.run(Launcher::variables, program_of("r", {"train.steps=12"})), Each(0)) << err_of(0);
  EXPECT_THAT(err_of(0), HasSubstr("the slowest connection of the last step: rank "));
  EXPECT_THAT(err_of(0), Not(HasSubstr("a link between ranks is slow")));
}

// The link between ranks 1 and 2 is cut before they first use it. Each is connected to rank 0.
TEST_F(Links, ThatAreCutBeforeTheirFirstUseEndTheRunInTime) {
  network_.set_link(1, 2, {.is_cut = true});
  const auto begin = std::chrono::steady_clock::now();
  EXPECT_THAT(ranks_.run(Launcher::variables, program_of("r", {}, /*timeout_s=*/8)), Each(6));
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(45));
  EXPECT_THAT(err_of(1), HasSubstr("; rank 2"));
  EXPECT_THAT(err_of(1), HasSubstr("has never connected to rank 1"));
  EXPECT_THAT(err_of(2), ContainsRegex("; rank 2 .* could not connect to rank 1 .* at " + Network::address(1) +
                                       ":[0-9]+: nothing there has answered"));
  expect_nothing_runs();
}

// The higher rank connects. One that comes before rank 0 listens tries again.
TEST_F(Links, TheHigherRankConnectsOnce) {
  EXPECT_THAT(ranks_.run(Launcher::variables, program_of("r", {"train.steps=2", "optimizer.warmup_steps=1"})), Each(0))
      << err_of(0);
  EXPECT_EQ(network_.num_connects(2, 1), 1);
  for (const auto& [from, to] : {std::pair(1, 0), {2, 0}}) EXPECT_GE(network_.num_connects(from, to), 1);
  for (const auto& [from, to] : {std::pair(0, 1), {0, 2}, {1, 2}}) EXPECT_EQ(network_.num_connects(from, to), 0);
}

}  // namespace
}  // namespace moebius
