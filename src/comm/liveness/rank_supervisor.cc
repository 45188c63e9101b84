#include "comm/liveness/rank_supervisor.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

#include "comm/liveness/rank_failure.h"

namespace moebius {
namespace {

using Clock = std::chrono::steady_clock;

// Returns the signals to wait for: all except those that stop or continue a process, and those of its own faults.
sigset_t waited_for() {
  sigset_t set;
  sigfillset(&set);
  for (const int signal : {SIGTSTP, SIGTTIN, SIGTTOU, SIGCONT, SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGABRT})
    sigdelset(&set, signal);
  return set;
}

// Returns the next of these signals; 0 when none came in that time.
int next_signal(const sigset_t& set, double seconds) {
  const auto whole = static_cast<time_t>(seconds);
  const timespec limit{.tv_sec = whole, .tv_nsec = static_cast<long>((seconds - static_cast<double>(whole)) * 1e9)};
  const int signal = ::sigtimedwait(&set, nullptr, &limit);
  return signal > 0 ? signal : 0;
}

bool is_ours(int exit_code) { return exit_code == 0 || exit_code > 128 || error_kind(exit_code).has_value(); }

class Supervisor {
 public:
  Supervisor(pid_t child, pid_t launcher, const sigset_t& signals, double grace_s)
      : child_(child), launcher_(launcher), signals_(signals), grace_s_(grace_s) {
    sigemptyset(&forwarded_);
  }

  // Returns the child's wait status. Forwards the signals that come before its end.
  int status() {
    for (;;) {
      int status = 0;
      const pid_t ended = ::waitpid(child_, &status, WNOHANG);
      if (ended == child_) return status;
      if (ended < 0 && errno == ECHILD) return static_cast<int>(ErrorKind::distributed) << 8;
      if (const int signal = next_signal(signals_, grace_s_)) forward(signal);
      follow_the_launcher();
    }
  }

  // Returns whether the signal went to the whole job. It may have reached the child first.
  bool was_sent_to_all(int signal) {
    sigset_t this_one;
    sigemptyset(&this_one);
    sigaddset(&this_one, signal);
    return signal == SIGPIPE || sigismember(&forwarded_, signal) || next_signal(this_one, 0.1) == signal;
  }

  // Waits for grace_s, or less if the launcher asks this process to end, too.
  void wait_for_others() {
    const auto end = Clock::now() + std::chrono::duration<double>(grace_s_);
    for (int signal = SIGCHLD; signal == SIGCHLD || signal == SIGPIPE;)
      signal = next_signal(signals_, std::max(0.0, std::chrono::duration<double>(end - Clock::now()).count()));
  }

 private:
  void forward(int signal) {
    if (signal == SIGCHLD || signal == SIGPIPE) return;
    sigaddset(&forwarded_, signal);
    ::kill(child_, signal);
  }

  void follow_the_launcher() {
    if (::getppid() == launcher_) return;
    if (launcher_ended_ == Clock::time_point{}) {
      launcher_ended_ = Clock::now();
      forward(SIGTERM);
    }
    if (Clock::now() - launcher_ended_ > std::chrono::duration<double>(10 * grace_s_)) ::kill(child_, SIGKILL);
  }

  pid_t child_, launcher_;
  sigset_t signals_, forwarded_;
  double grace_s_;
  Clock::time_point launcher_ended_{};
};

std::string death_text(const std::string& name, int status) {
  std::string what;
  if (WIFSIGNALED(status)) {
    const int signal = WTERMSIG(status);
    const char* hint = signal == SIGKILL ? "; if nobody sent it, a limit of memory or CPU time did" : "";
    what = fmt::format("was ended by signal {} ({}){}", signal, ::strsignal(signal), hint);
  } else {
    what =
        fmt::format("ended with code {}, which is not Moebius's but MPI's or another library's", WEXITSTATUS(status));
  }
  return fmt::format("the process of {} {}; the run ends with code {}", name, what,
                     static_cast<int>(ErrorKind::distributed));
}

// Returns the exit code of the supervisor.
int keep(Supervisor supervisor, const std::string& name, const std::function<void(const std::string&)>& report) {
  ::prctl(PR_SET_NAME, "rank-supervisor");  // so that pkill and killall of the program's name reach only the ranks
  const int status = supervisor.status();
  if (WIFEXITED(status) && is_ours(WEXITSTATUS(status))) return WEXITSTATUS(status);
  if (WIFSIGNALED(status) && supervisor.was_sent_to_all(WTERMSIG(status))) return 128 + WTERMSIG(status);
  report(death_text(name, status));
  supervisor.wait_for_others();
  return static_cast<int>(ErrorKind::distributed);
}

}  // namespace

pid_t supervise_rank(const std::string& name, const std::function<void(const std::string&)>& report,
                     void (*end)(int code), double grace_s) {
  const sigset_t signals = waited_for();
  sigset_t mask_before;
  struct sigaction by_default = {}, action_before = {};
  by_default.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &by_default, &action_before);  // a launcher may have ignored it, and then the child's end
  ::sigprocmask(SIG_BLOCK, &signals, &mask_before);
  const pid_t launcher = ::getppid(), supervisor = ::getpid(), child = ::fork();
  if (child > 0) end(keep(Supervisor(child, launcher, signals, grace_s), name, report));
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != supervisor) end(128 + SIGKILL);  // the supervisor was killed before the line above
  }
  ::sigprocmask(SIG_SETMASK, &mask_before, nullptr);
  ::sigaction(SIGCHLD, &action_before, nullptr);
  return child == 0 ? supervisor : 0;
}

}  // namespace moebius
