#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/transport/mpi.h"
#include "core/error.h"

namespace moebius {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::Not;

struct Ended {
  int exit_code = 0;
  double seconds = 0;
  std::string text;  // output of all ranks
};

// A launcher of 3 failing_rank processes.
struct Launcher {
  const char* name;
  const char* command;  // the way of failing is appended
};
void PrintTo(const Launcher& launcher, std::ostream* out) { *out << launcher.name; }

Ended run_command(const std::string& words) {
  const auto begin = std::chrono::steady_clock::now();
  const std::string command = words + " 2>&1 </dev/null";
  std::FILE* out = ::popen(command.c_str(), "r");
  Ended ended;
  std::array<char, 4096> piece;
  while (const size_t n = std::fread(piece.data(), 1, piece.size(), out)) ended.text.append(piece.data(), n);
  ended.exit_code = WEXITSTATUS(::pclose(out));
  ended.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return ended;
}

class RanksFail : public testing::TestWithParam<Launcher> {
 protected:
  Ended run_failing(const std::string& way) { return run_command(std::string(GetParam().command) + " " + way); }
  bool over_tcp() const { return std::string(GetParam().name) == "Tcp"; }
  bool over_mpich() const { return !over_tcp() && mpi_version().starts_with("MPICH"); }
};
class MpiRanksFail : public RanksFail {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MpiRanksFail);

std::vector<Launcher> launchers_of_mpi() {
  if (*MOEBIUS_FAILING_RANKS_MPI == 0) return {};
  return {{"Mpi", MOEBIUS_FAILING_RANKS_MPI}};
}
std::vector<Launcher> launchers() {
  std::vector<Launcher> launchers = launchers_of_mpi();
  launchers.push_back({"Tcp", MOEBIUS_FAILING_RANKS_TCP});
  return launchers;
}
std::string name_of(const testing::TestParamInfo<Launcher>& info) { return info.param.name; }
INSTANTIATE_TEST_SUITE_P(Over, RanksFail, testing::ValuesIn(launchers()), name_of);
INSTANTIATE_TEST_SUITE_P(Over, MpiRanksFail, testing::ValuesIn(launchers_of_mpi()), name_of);

TEST_P(RanksFail, WithoutAFailureNothingIsReported) {
  const Ended ended = run_failing("none");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
}

TEST_P(RanksFail, ARankThatThrowsEndsTheRun) {
  const Ended ended = run_failing("throw");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 1 (dp 1) threw, and others did not: the loss is not a number"));
  EXPECT_THAT(ended.text, HasSubstr("last collectives of rank 1 (dp 1):\n  barrier 0 of group world"));
  EXPECT_THAT(ended.text, Not(HasSubstr("the process of"))) << "a process that was ended has not died";
  EXPECT_LT(ended.seconds, 60);
}

// Over MPI the rank that reports first ends the others, so that one report may be the only one.
TEST_P(RanksFail, ARankThatStallsIsNamedWithTheCollective) {
  const Ended ended = run_failing("stall");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  const auto reported_by = [](int rank) {
    return AllOf(
        HasSubstr(fmt::format("all_reduce_sum 1 of group world (f32 x 7): rank {0} (dp {0}) has waited for 3 s; did "
                              "not join: rank 1 (dp 1)\n",
                              rank)),
        HasSubstr(fmt::format("last collectives of rank {0} (dp {0}):\n  barrier 0 of group world (u8 x 0)\n"
                              "  all_reduce_sum 1 of group world (f32 x 7): not ended\n",
                              rank)));
  };
  EXPECT_THAT(ended.text, AnyOf(reported_by(0), reported_by(2)));
  EXPECT_LT(ended.seconds, 60);
}

// The same, of ranks that wait for flags in memory.
TEST_P(RanksFail, WithoutAFailureInARoundNothingIsReported) {
  const Ended ended = run_failing("none_round");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
}

TEST_P(RanksFail, ARankThatThrowsEndsARound) {
  const Ended ended = run_failing("throw_round");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 1 (dp 1) threw, and others did not: the loss is not a number"));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, ARankThatStallsInARoundIsNamed) {
  const Ended ended = run_failing("stall_round");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("combine of layer 3: rank"));
  EXPECT_THAT(ended.text, HasSubstr("has waited for 3 s for rank 1 (dp 1), which has not come: round 2 of group world "
                                    "is expected of it, and 1 was seen"));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, AProcessThatIsKilledEndsARound) {
  const Ended ended = run_failing("kill_round");
  EXPECT_NE(ended.exit_code, 0) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 1 (dp 1)"));
  if (over_tcp()) {
    for (const int r : {0, 2})
      EXPECT_THAT(ended.text, HasSubstr(fmt::format("combine of layer 3: rank {0} (dp {0}) waits for rank ", r)));
    EXPECT_THAT(ended.text, HasSubstr(" waits for rank 1 (dp 1): round 2 of group world is expected of it, and 1 was "
                                      "seen; "));
    EXPECT_THAT(ended.text, HasSubstr("the connection to rank 1 (dp 1) broke: its process has ended"));
  }
  EXPECT_LT(ended.seconds, 60);
}

// Over TCP, ranks 1 and 2 have no connection yet, and no rank waits for rank 1.
TEST_P(RanksFail, AProcessThatIsKilledBeforeItWasConnectedIsNamed) {
  const Ended ended = run_failing("kill_unconnected");
  EXPECT_NE(ended.exit_code, 0) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 1"));
  if (over_tcp()) {
    for (const int r : {0, 2})
      EXPECT_THAT(ended.text,
                  HasSubstr(fmt::format("rank {0} (dp {0}) waits, and the connection to rank 1 (dp 1) broke: "
                                        "its process has ended; did not join: rank 1 (dp 1)",
                                        r)));
  }
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, AProcessThatIsStoppedIsNamedAndEnded) {
  const Ended ended = run_failing("stop");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("did not join: rank 1 (dp 1)\n"));
  EXPECT_LT(ended.seconds, 60);
}

// Rank 0 stalls. Rank 1 is stopped while it waits for rank 0, and continued after the timeout. The
// time stopped must not count as waiting.
TEST_P(MpiRanksFail, AProcessThatIsStoppedWhileItWaitsBlamesNobody) {
  const Ended ended = run_failing("stop_waiting");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 2 (dp 2) has waited for 3 s; did not join: rank 0 (dp 0)\n"));
  EXPECT_THAT(ended.text, Not(HasSubstr("rank 1 (dp 1) has waited")));
  EXPECT_THAT(ended.text, Not(HasSubstr("the process of")));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, AJobThatIsSuspendedContinues) {
  const Ended ended = run_failing("suspend");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
  EXPECT_GT(ended.seconds, 5);
}

// The construction of the watchdog of the other ranks may throw, too.
TEST_P(MpiRanksFail, ARankThatThrowsBeforeTheRunEndsAll) {
  const Ended ended = run_failing("none rank_watch.connect:1:throw");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("report: rank 1 (dp 1) threw, and others did not: rank_watch.connect: Input/output "
                                    "error (a test's fault)\n"));
  EXPECT_LT(ended.seconds, 60);
}

// MPI itself waits forever for a missing rank, in each call in which all ranks meet.
TEST_P(MpiRanksFail, ARankStoppedOutsideOfMpiEndsTheRunInTime) {
  struct Place {
    const char *way, *fault, *call;
  };
  for (const Place& at :
       {Place{"none", "mpi.init:1:stop", "MPI_Init_thread"}, Place{"none", "mpi.dup:1:stop", "MPI_Comm_dup"},
        Place{"none", "mpi.dup:2:stop", "MPI_Comm_dup"}, Place{"all", "mpi.own_error:1:stop", "MPI_Allgather"},
        Place{"none", "mpi.finalize:1:stop", "MPI_Finalize"}}) {
    SCOPED_TRACE(at.fault);
    const Ended ended = run_command(fmt::format("timeout -k 3 60 {} {} {}", GetParam().command, at.way, at.fault));
    // MPICH's launcher kills the others as soon as one has ended, and returns that as its own code.
    EXPECT_THAT(ended.exit_code, AnyOf(6, over_mpich() ? SIGKILL : 6)) << ended.text;
    const std::string waits = " has waited for 3 s for the other ranks, one of which has not joined";
    const auto says = [&](int rank) {
      return HasSubstr(fmt::format("report: {}: rank {} (dp {}){}", at.call, rank, rank, waits));
    };
    EXPECT_THAT(ended.text, AnyOf(says(0), says(2)));
    EXPECT_EQ(ended.text.find("this recipe is wrong on every rank") != ended.text.npos, std::string(at.way) == "all");
  }
}

// Returns the report of rank 0 or 2, when rank 1 was killed during their all_reduce_sum.
std::string report_of_survivor(int rank, const std::string& why) {
  return fmt::format(
      "all_reduce_sum 1 of group world (f32 x 7): rank {0} (dp {0}) waits, and {1}; did not join: rank 1 (dp 1)\n"
      "last collectives of rank {0} (dp {0}):\n"
      "  barrier 0 of group world (u8 x 0)\n"
      "  all_reduce_sum 1 of group world (f32 x 7): not ended\n",
      rank, why);
}

TEST_P(RanksFail, AProcessThatIsKilledIsNamedByAllOthers) {
  const std::string why = over_tcp() ? "the connection to rank 1 (dp 1) broke: its process has ended"
                                     : "the process of rank 1 (dp 1) has ended";
  const std::string of_0 = report_of_survivor(0, why), of_2 = report_of_survivor(2, why);
  const Ended ended = run_failing("kill");
  EXPECT_THAT(ended.text, AllOf(HasSubstr(of_0), HasSubstr(of_2)));
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  if (!over_tcp()) {
    EXPECT_THAT(ended.text, HasSubstr("supervisor: the process of a rank was ended by signal 9 (Killed)"));
  }
  EXPECT_LT(ended.seconds, 60);
}

// Over TCP, a rank that computes notices the failure at its next collective.
TEST_P(MpiRanksFail, AProcessThatIsKilledWhileOthersComputeIsNamed) {
  const std::string text =
      "rank 0 (dp 0) computes, and the process of rank 1 (dp 1) has ended; did not join: rank 1 (dp 1)\n"
      "last collectives of rank 0 (dp 0):\n  barrier 0 of group world (u8 x 0)\n";
  const Ended ended = run_failing("kill_idle");
  EXPECT_THAT(ended.text, HasSubstr(text));
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(MpiRanksFail, RanksThatCannotWatchEachOtherSaySoOnceAndContinue) {
  const Ended ended =
      run_command("env MOEBIUS_FAULT=rank_watch.listen:1:throw " + std::string(GetParam().command) + " none");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
  EXPECT_THAT(ended.text,
              HasSubstr("mpi: the ranks could not connect to each other outside MPI (rank 0: "
                        "rank_watch.listen: Input/output error (a test's fault)); the run continues, but only the "
                        "launcher will notice a rank that is killed"));
  EXPECT_EQ(ended.text.find("the run continues"), ended.text.rfind("the run continues"));
}

TEST_P(RanksFail, SizesThatDisagreeAreFound) {
  const Ended ended = run_failing("sizes");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("the ranks disagree about a shape or count"));
}

TEST_P(RanksFail, ErrorOfEveryRankKeepsItsKind) {
  const Ended ended = run_failing("all");
  EXPECT_EQ(ended.exit_code, 2) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("caught: this recipe is wrong on every rank"));
  EXPECT_THAT(ended.text, Not(HasSubstr("report:")));
}

}  // namespace
}  // namespace moebius
