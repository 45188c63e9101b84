// Runs a part of a test in a process of its own. MOEBIUS_FAULT has not been read there, and a crash
// ends only that process.
#pragma once

#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

namespace moebius {

// The crash of a process loses nothing of the page cache, so no real device is needed. A sync in
// memory costs nothing.
inline const bool kInMemory = std::filesystem::is_directory("/dev/shm") && ::setenv("TMPDIR", "/dev/shm", 0) == 0;

constexpr int kKilled = 128 + SIGKILL, kNotStarted = 127;  // the second is that of a shell, and of the loader

// MOEBIUS_FAULT and MOEBIUS_FAULT_LOG for that process. An empty one is not set.
struct FaultRequest {
  std::string fault, log;
};

// Starts body() in a new process and returns its id. Failed assertions and exceptions give exit
// status 1. REQUIRES: this process has one thread and has reached no fault point.
template <class Body>
pid_t start_forked(const FaultRequest& request, Body&& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child != 0) return child;
  if (!request.fault.empty()) ::setenv("MOEBIUS_FAULT", request.fault.c_str(), 1);
  if (!request.log.empty()) ::setenv("MOEBIUS_FAULT_LOG", request.log.c_str(), 1);
  try {
    body();
  } catch (const std::exception& e) {
    ADD_FAILURE() << e.what();
  }
  std::fflush(nullptr);
  ::_exit(testing::Test::HasFailure() ? 1 : 0);
}

// Returns the exit status, or 128 + the signal that ended the process.
inline int end_of(pid_t process) {
  int status = 0;
  if (::waitpid(process, &status, 0) != process) return -1;
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

template <class Body>
int run_forked(const FaultRequest& request, Body&& body) {
  return end_of(start_forked(request, body));
}

// Mounts a file system for this process and its children. Returns false where the system does
// not allow it.
inline bool mount_small(const std::string& dir, const char* options) {
  if (::unshare(CLONE_NEWNS) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0) return false;
  ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr);
  return ::mount("none", dir.c_str(), "tmpfs", 0, options) == 0;
}

}  // namespace moebius
