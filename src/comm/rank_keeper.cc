#include "comm/rank_keeper.h"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>

#include "core/error.h"

namespace moebius {
namespace {

constexpr int kAsking[] = {SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};

bool asks(int signal) {
  for (const int each : kAsking)
    if (each == signal) return true;
  return false;
}

sigset_t asking_signals() {
  sigset_t set;
  sigemptyset(&set);
  for (const int signal : kAsking) sigaddset(&set, signal);
  return set;
}

sigset_t all_signals() {
  sigset_t set = asking_signals();
  sigaddset(&set, SIGCHLD);
  return set;
}

// The status with which the child ended; hands on what arrives before.
int status_of(pid_t child, const sigset_t& signals) {
  for (;;) {
    int status = 0;
    if (::waitpid(child, &status, WNOHANG) == child) return status;
    const int signal = ::sigwaitinfo(&signals, nullptr);
    if (signal > 0 && signal != SIGCHLD) ::kill(child, signal);
  }
}

std::string death_text(const std::string& name, int signal) {
  const char* hint =
      signal == SIGKILL ? "; where nobody sent it, this machine or the job's limit ran out of memory" : "";
  return fmt::format("the process of {} was ended by signal {} ({}){}; the run ends with code {}", name, signal,
                     ::strsignal(signal), hint, static_cast<int>(ErrorKind::distributed));
}

// Returns earlier when the launcher wants it to end, too.
void wait_for_others(double grace_s) {
  const sigset_t signals = asking_signals();
  const auto whole = static_cast<time_t>(grace_s);
  const timespec limit{.tv_sec = whole, .tv_nsec = static_cast<long>((grace_s - static_cast<double>(whole)) * 1e9)};
  ::sigtimedwait(&signals, nullptr, &limit);
}

[[noreturn]] void keep(pid_t child, const std::string& name, const std::function<void(const std::string&)>& report,
                       const sigset_t& signals, double grace_s) {
  ::prctl(PR_SET_NAME, "rank-keeper");  // pkill and killall of the program's name mean the ranks
  const int status = status_of(child, signals);
  if (WIFEXITED(status)) ::_exit(WEXITSTATUS(status));
  const int signal = WTERMSIG(status);
  if (asks(signal)) ::_exit(128 + signal);
  report(death_text(name, signal));
  wait_for_others(grace_s);
  ::_exit(static_cast<int>(ErrorKind::distributed));
}

}  // namespace

pid_t keep_rank(const std::string& name, const std::function<void(const std::string&)>& report, double grace_s) {
  const sigset_t signals = all_signals();
  sigset_t mask_before;
  struct sigaction by_default = {}, action_before = {};
  by_default.sa_handler = SIG_DFL;
  ::sigaction(SIGCHLD, &by_default, &action_before);  // a launcher may have had it ignored, and children with it
  ::sigprocmask(SIG_BLOCK, &signals, &mask_before);
  const pid_t keeper = ::getpid(), child = ::fork();
  if (child > 0) keep(child, name, report, signals, grace_s);
  if (child == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != keeper) ::_exit(128 + SIGKILL);  // it was killed before that
  }
  ::sigprocmask(SIG_SETMASK, &mask_before, nullptr);
  ::sigaction(SIGCHLD, &action_before, nullptr);
  return child == 0 ? keeper : 0;
}

}  // namespace moebius
