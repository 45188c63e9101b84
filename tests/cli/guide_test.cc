// Runs the commands of README.md and of the guides as they are written there, with fewer steps.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zstd.h>

#include <filesystem>
#include <sstream>

#include "tests/cli/program.h"

namespace moebius {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

// Returns the commands of the first block of code after `heading`.
std::vector<std::string> commands_after(const std::string& file, const std::string& heading) {
  const std::string text = read_file(MOEBIUS_SOURCE_DIR "/" + file);
  const size_t at = text.find(heading), begin = text.find("\n```\n", at), end = text.find("\n```\n", begin + 1);
  if (at == text.npos || begin == text.npos || end == text.npos)
    return ADD_FAILURE() << file << " has no commands after " << heading, std::vector<std::string>{};
  std::vector<std::string> commands;
  std::istringstream lines(text.substr(begin + 5, end + 1 - begin - 5));
  for (std::string line; std::getline(lines, line);)
    if (!line.empty()) commands.push_back(line);
  return commands;
}

std::string compressed(const std::string& text) {
  std::string out(ZSTD_compressBound(text.size()), '\0');
  out.resize(ZSTD_compress(out.data(), out.size(), text.data(), text.size(), 1));
  return out;
}

// A folder that looks like a checkout in which the program is built, with two texts.
class Guide : public testing::Test {
 protected:
  void SetUp() override {
    std::filesystem::create_directories(dir_.path("build"));
    std::filesystem::create_symlink(built_program("moebius"), dir_.path("build/moebius"));
    std::filesystem::create_directory_symlink(MOEBIUS_SOURCE_DIR "/recipes", dir_.path("recipes"));
    std::string text;
    for (int i = 0; i < 400; ++i) text += fmt::format("line {} of a small text\n", i * i);
    write_file_atomic(dir_.path("book.txt"), text);
    write_file_atomic(dir_.path("more.jsonl.zst"), compressed("{\"text\": \"one more text\"}\n"));
    write_file_atomic(dir_.path("unseen.txt"), text.substr(text.size() / 2));
  }
  Ran shell(const std::string& command) {
    const std::string line = fmt::format("cd {} && ( {} ) > stdout 2> stderr", quoted(dir_.path()), command);
    const int status = std::system(line.c_str());
    return {.code = WEXITSTATUS(status), .out = read_file(dir_.path("stdout")), .err = read_file(dir_.path("stderr"))};
  }
  // Runs the commands in order. Those that train get `overrides` as well. Returns their logs.
  std::string run_all(const std::vector<std::string>& commands, const std::string& overrides) {
    std::string logs;
    for (const std::string& command : commands) {
      const bool trains = command.find("build/moebius train ") != command.npos;
      const Ran ran = shell(command + (trains ? overrides : ""));
      EXPECT_EQ(ran.code, 0) << command << ": " << ran.err;
      if (trains) logs += ran.err;
    }
    return logs;
  }
  TestDir dir_;
};

const std::string kFewSteps =
    " --set train.steps=2 --set train.global_batch=2 --set train.micro_batch=2 --set optimizer.warmup_steps=0";

TEST_F(Guide, ReadmeTrainsAModelOfYourOwn) {
  const auto commands = commands_after("README.md", "**Train your own model.**");
  const std::string logs = run_all(commands, kFewSteps);
  EXPECT_THAT(logs, HasSubstr("eval at step 2: loss "));
}

TEST_F(Guide, TrainGoesFromATextToAModel) {
  const auto commands = commands_after("docs/guide/train.md", "\n## From text to a model\n");
  const std::string logs = run_all(commands, kFewSteps);
  EXPECT_THAT(logs, HasSubstr("eval at step 2: loss "));
}

// The launchers are left out: here the ranks of each command are one.
TEST_F(Guide, EachCommandOfRanksTrains) {
  int trained = 0;
  for (const std::string& line : commands_after("docs/guide/ranks.md", "\n## A first run\n")) {
    const std::string command = line.substr(line.find("build/moebius"));
    const Ran ran = shell(command);
    EXPECT_EQ(ran.code, 0) << command << ": " << ran.err;
    if (!command.starts_with("build/moebius train ")) continue;
    EXPECT_THAT(ran.err, Not(HasSubstr("nothing to do"))) << command;
    ++trained;
  }
  EXPECT_EQ(trained, 3);
}

}  // namespace
}  // namespace moebius
