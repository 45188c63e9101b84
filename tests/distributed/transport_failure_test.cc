#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <array>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

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

// The exit code of mpirun is its own; over TCP it is the rank's, which knows at once.
TEST_P(RanksFail, AProcessThatIsKilledEndsTheRun) {
  const Ended ended = run_failing("kill");
  EXPECT_NE(ended.exit_code, 0) << ended.text;
  EXPECT_LT(ended.seconds, 60);
  if (!over_tcp()) return;
  EXPECT_EQ(ended.exit_code, 6) << ended.text;
  EXPECT_THAT(ended.text,
              HasSubstr("all_reduce_sum 1 of group world (f32 x 7): rank 0 (dp 0) waits, and the connection "
                        "to rank 1 (dp 1) broke: its process has ended; did not join: rank 1 (dp 1)\n"
                        "last collectives of rank 0 (dp 0):\n"));
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
