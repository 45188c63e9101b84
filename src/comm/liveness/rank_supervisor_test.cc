// Each case runs in a process of its own, as a launcher would start it.
#include "comm/liveness/rank_supervisor.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

namespace moebius {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr double kGraceS = 0.2;

std::atomic<int> got_signal{0};

// A process as a launcher starts it, with what it and its child write to `out`.
class Started {
 public:
  // body: the child's work; returns its exit code.
  explicit Started(int (*body)()) {
    EXPECT_EQ(::pipe(pipe_.data()), 0);
    pid_ = ::fork();
    if (pid_ > 0) {
      ::close(pipe_[1]);
      return;
    }
    out = pipe_[1];
    supervisor = supervise_rank("rank 1 of 2", say, ::_exit, kGraceS);
    ::_exit(body());
  }
  ~Started() { ::close(pipe_[0]); }

  pid_t pid() const { return pid_; }
  std::string line() const {  // until the end of the line, or until all writers are gone
    std::string text;
    for (char c = 0; ::read(pipe_[0], &c, 1) == 1 && c != '\n';) text += c;
    return text;
  }
  int status() const {
    int status = 0;
    EXPECT_EQ(::waitpid(pid_, &status, 0), pid_);
    return status;
  }
  int exit_code() const {
    const int ended = status();
    return WIFEXITED(ended) ? WEXITSTATUS(ended) : -WTERMSIG(ended);
  }

  static void say(const std::string& text) { (void)!::write(out, (text + "\n").data(), text.size() + 1); }
  static inline int out = -1;          // in this process
  static inline pid_t supervisor = 0;  // in this process

 private:
  std::array<int, 2> pipe_{};
  pid_t pid_ = 0;
};

void nap() { std::this_thread::sleep_for(std::chrono::milliseconds(1)); }

// Prints a line when it is ready for these signals; returns the one that came.
int wait_for_any(std::initializer_list<int> signals) {
  for (const int signal : signals) ::signal(signal, [](int got) { got_signal = got; });
  nap();  // g++ 12's thread sanitizer loses a signal that comes in a process's first call that may block
  Started::say("ready");
  while (got_signal == 0) nap();
  return got_signal;
}

int sleep_until_signal() { return wait_for_any({SIGTERM, SIGUSR1}) == SIGTERM ? 3 : 4; }

TEST(RankSupervisor, IsTheParentAndEndsWithTheRanksCode) {
  const Started rank([] { return Started::supervisor == ::getppid() && Started::supervisor != ::getpid() ? 5 : 1; });
  EXPECT_EQ(rank.exit_code(), 5);
}

TEST(RankSupervisor, ForwardsSignalsThatAskTheRankToEnd) {
  for (const auto& [signal, code] : {std::pair{SIGTERM, 3}, {SIGUSR1, 4}}) {
    const Started rank(sleep_until_signal);
    EXPECT_EQ(rank.line(), "ready");
    ::kill(rank.pid(), signal);
    EXPECT_EQ(rank.exit_code(), code);
  }
}

TEST(RankSupervisor, EndsByASignalThatTheRankDoesNotHandle) {
  const Started rank([] {
    ::signal(SIGINT, SIG_DFL);  // nohup and shells may have ignored it
    Started::say("ready");
    return ::pause();
  });
  rank.line();
  ::kill(rank.pid(), SIGINT);
  EXPECT_EQ(rank.exit_code(), 128 + SIGINT);
}

TEST(RankSupervisor, ReportsTheSignalAndEndsWith6) {
  const auto begin = std::chrono::steady_clock::now();
  const Started killed([] { return ::raise(SIGKILL); });
  EXPECT_THAT(killed.line(), StartsWith("the process of rank 1 of 2 was ended by signal 9 (Killed); if nobody sent it, "
                                        "a limit of memory or CPU time did; the run ends with code 6"));
  EXPECT_EQ(killed.exit_code(), 6);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  EXPECT_GE(took.count(), kGraceS) << "the others need time to report";

  const Started crashed([] {
    ::signal(SIGSEGV, SIG_DFL);
    return ::raise(SIGSEGV);
  });
  EXPECT_THAT(crashed.line(), HasSubstr("was ended by signal 11 (Segmentation fault); the run"));
  EXPECT_EQ(crashed.exit_code(), 6);
}

TEST(RankSupervisor, ASignalToTheRankOnlyIsAFailure) {
  const Started rank([] {
    ::signal(SIGHUP, SIG_DFL);
    Started::say(std::to_string(::getpid()));
    return ::pause();
  });
  ::kill(std::stoi(rank.line()), SIGHUP);
  EXPECT_THAT(rank.line(), HasSubstr("was ended by signal 1 (Hangup); the run ends with code 6"));
  EXPECT_EQ(rank.exit_code(), 6);
}

TEST(RankSupervisor, AClosedReaderIsNoFailure) {
  const Started rank([] {
    ::signal(SIGPIPE, SIG_DFL);
    return ::raise(SIGPIPE);
  });
  EXPECT_EQ(rank.line(), "");
  EXPECT_EQ(rank.exit_code(), 128 + SIGPIPE);
}

// Open MPI ends a process with this code when another one dies in MPI_Init.
TEST(RankSupervisor, UnknownExitCodesBecome6) {
  const Started rank([] { return 1; });
  EXPECT_THAT(rank.line(),
              HasSubstr("ended with code 1, which is not Moebius's but MPI's or another library's; the run"));
  EXPECT_EQ(rank.exit_code(), 6);
}

TEST(RankSupervisor, OtherSignalsDoNotEndTheSupervisor) {
  for (const int signal : {SIGALRM, SIGXCPU, SIGPIPE}) {
    const Started rank([] {
      wait_for_any({SIGALRM, SIGXCPU, SIGTERM});
      return 5;
    });
    rank.line();
    ::kill(rank.pid(), signal);
    if (signal == SIGPIPE) ::kill(rank.pid(), SIGTERM);
    EXPECT_EQ(rank.exit_code(), 5) << signal;
  }
}

// A launcher that is killed does not end its processes.
TEST(RankSupervisor, TheRankIsAskedToEndWhenTheLauncherIsGone) {
  std::array<int, 2> pipe;
  ASSERT_EQ(::pipe(pipe.data()), 0);
  const pid_t launcher = ::fork();
  if (launcher == 0) {
    if (::fork() > 0) ::_exit((::sleep(1), 0));
    Started::out = pipe[1];
    supervise_rank("rank 1 of 2", Started::say, ::_exit, kGraceS);
    ::signal(SIGTERM, SIG_IGN);  // a rank that hangs
    Started::say("hangs");
    ::_exit(::pause());
  }
  ::close(pipe[1]);
  std::string text;
  for (char c = 0; ::read(pipe[0], &c, 1) == 1;) text += c;  // until rank and supervisor have ended
  ::close(pipe[0]);
  EXPECT_THAT(text, StartsWith("hangs\nthe process of rank 1 of 2 was ended by signal 9"));
  ::waitpid(launcher, nullptr, 0);
}

// A launcher that ends the other ranks signals the supervisor, too.
TEST(RankSupervisor, DoesNotKeepTheLauncherWaiting) {
  const Started rank([] {
    supervise_rank("rank 1 of 2", Started::say, ::_exit, 60);
    return ::raise(SIGKILL);
  });
  rank.line();
  ::kill(rank.pid(), SIGTERM);
  EXPECT_EQ(rank.exit_code(), 6);
}

TEST(RankSupervisor, KillingTheSupervisorEndsTheRank) {
  const Started rank(sleep_until_signal);
  EXPECT_EQ(rank.line(), "ready");
  ::kill(rank.pid(), SIGKILL);
  EXPECT_EQ(rank.exit_code(), -SIGKILL);
  EXPECT_EQ(rank.line(), "") << "no writer is left";
}

TEST(RankSupervisor, SignalMaskAndIgnoredChildrenAreUnchanged) {
  static std::array<int, 2> may_end{};
  ASSERT_EQ(::pipe(may_end.data()), 0);
  ::signal(SIGCHLD, SIG_IGN);
  sigset_t blocked;
  sigemptyset(&blocked);
  sigaddset(&blocked, SIGUSR2);
  sigset_t before;
  ::sigprocmask(SIG_BLOCK, &blocked, &before);
  const Started rank([] {
    sigset_t now;
    ::sigprocmask(SIG_BLOCK, nullptr, &now);
    struct sigaction children;
    ::sigaction(SIGCHLD, nullptr, &children);
    char byte = 0;  // a process that ended now would leave no status, since this test still ignores SIGCHLD
    if (::read(may_end[0], &byte, 1) != 1) return 1;
    return sigismember(&now, SIGUSR2) && !sigismember(&now, SIGTERM) && children.sa_handler == SIG_IGN ? 3 : 1;
  });
  ::signal(SIGCHLD, SIG_DFL);
  ::sigprocmask(SIG_SETMASK, &before, nullptr);
  EXPECT_EQ(::write(may_end[1], "", 1), 1);
  EXPECT_EQ(rank.exit_code(), 3);
  for (const int end : may_end) ::close(end);
}

}  // namespace
}  // namespace moebius
