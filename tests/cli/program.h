// Starts the built program and keeps its output.
#pragma once

#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "io/files.h"
#include "io/testing.h"
#include "tests/built.h"

namespace moebius {

struct Ran {
  int code = 0;  // exit code; 128 + n after signal n
  std::string out, err;
};

// Quotes a word for the shell.
inline std::string quoted(const std::string& word) {
  std::string text = "'";
  for (const char c : word) text += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return text + "'";
}

// Runs `moebius` with these words in `dir`, with standard input from a text.
inline Ran run_moebius(const TestDir& dir, const std::vector<std::string>& words, const std::string& input = "") {
  write_file_atomic(dir.path("stdin"), input);
  std::string command = "cd " + quoted(dir.path()) + " && " + quoted(built_program("moebius"));
  for (const std::string& word : words) command += " " + quoted(word);
  command += " < stdin > stdout 2> stderr";
  const int status = std::system(command.c_str());
  return {.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
          .out = read_file(dir.path("stdout")),
          .err = read_file(dir.path("stderr"))};
}

// Returns whether the process has a handler for the signal. Before that, the signal would
// kill the process.
inline bool catches(pid_t process, int signal) {
  std::ifstream status("/proc/" + std::to_string(process) + "/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("SigCgt:")) return std::stoull(line.substr(7), nullptr, 16) >> (signal - 1) & 1;
  }
  return false;
}

// Runs `moebius` with these words in `dir`, and sends it the signal as soon as it has a handler for it.
inline Ran run_and_signal(const TestDir& dir, std::vector<std::string> words, int signal) {
  words.insert(words.begin(), "moebius");
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  const std::string program = built_program("moebius");
  const pid_t process = ::fork();
  if (process == 0) {
    if (::chdir(dir.path().c_str()) != 0) ::_exit(99);
    ::dup2(::open("stdout", O_WRONLY | O_CREAT | O_TRUNC, 0666), STDOUT_FILENO);
    ::dup2(::open("stderr", O_WRONLY | O_CREAT | O_TRUNC, 0666), STDERR_FILENO);
    ::execv(program.c_str(), arguments.data());
    ::_exit(98);
  }
  int status = 0;
  bool ended = false;
  while (!catches(process, signal) && !ended) {
    ended = ::waitpid(process, &status, WNOHANG) != 0;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_FALSE(ended) << "ended by itself: " << status;
  if (!ended) {
    EXPECT_EQ(::kill(process, signal), 0);
    EXPECT_EQ(::waitpid(process, &status, 0), process);
  }
  return {.code = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status),
          .out = read_file(dir.path("stdout")),
          .err = read_file(dir.path("stderr"))};
}

// Returns the JSON object that a command printed. It must have exited with 0.
inline nlohmann::json json_of(const Ran& ran) {
  EXPECT_EQ(ran.code, 0) << ran.err;
  return nlohmann::json::parse(ran.out, nullptr, /*allow_exceptions=*/false);
}

// Expects that the command failed as documented: this code, this text on standard error, nothing on
// standard output.
inline void expect_refused(const Ran& ran, int code, const std::string& text) {
  EXPECT_EQ(ran.code, code) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr(text));
  EXPECT_EQ(ran.out, "");
}

}  // namespace moebius
