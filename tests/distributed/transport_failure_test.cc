#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "comm/mpi.h"

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::Not;

struct Ended {
  int exit_code = 0;
  double seconds = 0;
  std::string text;  // of all ranks
};

// A launcher of 3 failing_rank.
struct Launcher {
  const char* name;
  const char* command;  // that the way of failing follows
};

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
  bool kills_at_once() const { return !over_tcp() && mpi_version().starts_with("MPICH"); }
};

std::vector<Launcher> launchers() {
  std::vector<Launcher> launchers{{"Tcp", MOEBIUS_FAILING_RANKS_TCP}};
  if (*MOEBIUS_FAILING_RANKS_MPI != 0) launchers.push_back({"Mpi", MOEBIUS_FAILING_RANKS_MPI});
  return launchers;
}
INSTANTIATE_TEST_SUITE_P(Over, RanksFail, testing::ValuesIn(launchers()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_P(RanksFail, NoneIsNone) {
  const Ended ended = run_failing("none");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
}

TEST_P(RanksFail, ARankThatThrowsEndsTheRun) {
  const Ended ended = run_failing("throw");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("rank 1 (dp 1) threw, and others did not: the loss is not a number"));
  EXPECT_THAT(ended.text, HasSubstr("last collectives of rank 1 (dp 1):\n  barrier 0 of group world"));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, ARankThatStallsIsNamedWithTheCollective) {
  const Ended ended = run_failing("stall");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text,
              HasSubstr("all_reduce_sum 1 of group world (f32 x 7): rank 0 (dp 0) has waited for 3 s; did not "
                        "join: rank 1 (dp 1)\n"));
  EXPECT_THAT(ended.text, HasSubstr("last collectives of rank 0 (dp 0):\n  barrier 0 of group world (u8 x 0)\n"
                                    "  all_reduce_sum 1 of group world (f32 x 7): not ended\n"));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, AProcessThatIsStoppedIsNamedAndEnded) {
  const Ended ended = run_failing("stop");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("did not join: rank 1 (dp 1)\n"));
  EXPECT_LT(ended.seconds, 60);
}

// All that are left say so.
TEST_P(RanksFail, AProcessThatIsKilledEndsTheRun) {
  if (kills_at_once()) return;
  const Ended ended = run_failing("kill");
  EXPECT_LT(ended.seconds, 60);
  for (const int survivor : {0, 2})
    EXPECT_THAT(ended.text,
                HasSubstr(fmt::format("all_reduce_sum 1 of group world (f32 x 7): rank {0} (dp {0}) waits, "
                                      "and {1}; did not join: rank 1 (dp 1)\n"
                                      "last collectives of rank {0} (dp {0}):\n"
                                      "  barrier 0 of group world (u8 x 0)\n"
                                      "  all_reduce_sum 1 of group world (f32 x 7): not ended\n",
                                      survivor,
                                      over_tcp() ? "the connection to rank 1 (dp 1) broke: its process has ended"
                                                 : "the process of rank 1 (dp 1) has ended")));
  // The rank's own over TCP; Open MPI takes that of the rank that was killed.
  EXPECT_EQ(ended.exit_code, over_tcp() ? 6 : 128 + SIGKILL) << ended.text;
}

// MPICH's launcher kills the others as soon as it sees that one has died, and may be faster than they are.
TEST_P(RanksFail, AProcessThatIsKilledIsNamedBeforeAllAreKilled) {
  if (!kills_at_once()) return;
  std::string text;
  for (int attempt = 0; attempt < 10 && text.find("did not join") == text.npos; ++attempt) {
    const Ended ended = run_failing("kill");
    EXPECT_EQ(ended.exit_code, SIGKILL) << ended.text;
    EXPECT_LT(ended.seconds, 60);
    text = ended.text;
  }
  EXPECT_THAT(text, HasSubstr("waits, and the process of rank 1 (dp 1) has ended; did not join: rank 1 (dp 1)\n"));
}

TEST_P(RanksFail, AProcessThatIsKilledWhileOthersComputeIsNamed) {
  if (over_tcp() || kills_at_once()) return;
  const Ended ended = run_failing("kill_idle");
  EXPECT_THAT(ended.text, HasSubstr("rank 0 (dp 0) computes, and the process of rank 1 (dp 1) has ended; did not join: "
                                    "rank 1 (dp 1)\nlast collectives of rank 0 (dp 0):\n  barrier 0 of group world"));
  EXPECT_LT(ended.seconds, 60);
}

TEST_P(RanksFail, RanksThatCannotWatchEachOtherSaySoAndGoOn) {
  if (over_tcp()) return;
  const Ended ended =
      run_command("env MOEBIUS_FAULT=rank_watch.listen:1:throw " + std::string(GetParam().command) + " none");
  EXPECT_EQ(ended.exit_code, 0) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("mpi: the ranks could not connect to each other beside MPI (rank 0: "
                                    "rank_watch.listen: Input/output error (a test's fault)); going on: a rank that is "
                                    "killed will be noticed by the launcher alone"));
  EXPECT_EQ(ended.text.find("going on"), ended.text.rfind("going on"));
}

TEST_P(RanksFail, SizesThatDisagreeAreFound) {
  const Ended ended = run_failing("sizes");
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("the ranks disagree about a shape or count"));
}

TEST_P(RanksFail, WhatEveryRankThrowsKeepsItsKind) {
  const Ended ended = run_failing("all");
  EXPECT_EQ(ended.exit_code, 2) << ended.text;
  EXPECT_THAT(ended.text, HasSubstr("caught: this recipe is wrong on every rank"));
  EXPECT_THAT(ended.text, Not(HasSubstr("report:")));
}

}  // namespace
}  // namespace moebius
