// Starts the built program and keeps its output.
#pragma once

#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
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
