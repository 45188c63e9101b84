// start_ranks N PROGRAM [ARGUMENT]...: starts N processes of a program with the variables that
// torchrun sets. When one of them fails, it ends the others some seconds later, as torchrun does.
// Its exit code is that of rank 0.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "comm/transport/reserved_port_testing.h"

namespace {

constexpr int kEndOthersS = 5;

pid_t start(int rank, const std::string& size, const std::string& port, char** words) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  ::setenv("RANK", std::to_string(rank).c_str(), 1);
  ::setenv("LOCAL_RANK", std::to_string(rank).c_str(), 1);
  ::setenv("WORLD_SIZE", size.c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  ::setenv("MASTER_PORT", port.c_str(), 1);
  ::execv(words[0], words);
  std::perror(words[0]);
  ::_exit(127);
}

int code_of(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const moebius::ReservedPort reserved;
  const std::string port = std::to_string(reserved.number());
  std::vector<pid_t> ranks;
  for (int r = 0; r < std::atoi(argv[1]); ++r) ranks.push_back(start(r, argv[1], port, argv + 2));
  int code_of_first = 0;
  auto kill_at = std::chrono::steady_clock::time_point::max();
  for (size_t left = ranks.size(); left > 0;) {
    int status = 0;
    const pid_t ended = ::waitpid(-1, &status, WNOHANG);
    if (ended > 0) {
      --left;
      if (ended == ranks[0]) code_of_first = code_of(status);
      if (code_of(status) != 0 && kill_at == std::chrono::steady_clock::time_point::max())
        kill_at = std::chrono::steady_clock::now() + std::chrono::seconds(kEndOthersS);
      for (pid_t& rank : ranks)
        if (rank == ended) rank = 0;
      continue;
    }
    if (std::chrono::steady_clock::now() > kill_at)
      for (const pid_t rank : ranks)
        if (rank != 0) ::kill(rank, SIGKILL);
    ::usleep(2000);
  }
  return code_of_first;
}
