// Runs the program itself to train a tiny model. It can be started, killed and started again, and
// its folder inspected.
#pragma once

#include <fcntl.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/list.h"
#include "checkpoint/reader.h"
#include "io/files.h"
#include "io/testing.h"
#include "tests/built.h"
#include "tests/faults/forked.h"

namespace moebius {

using Words = std::vector<std::string>;

inline Words joined(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// The surroundings of a process: variables, and the files of its output.
struct Surroundings {
  std::map<std::string, std::string> environment;
  std::string out = "out", err = "err";  // files in the folder where it runs
  std::function<void()> enter = [] {};   // moves the process to where it runs, before it changes to its folder
};

// Starts a program with these words in `dir`. If it cannot be started, its standard error says why, and its exit status
// is 127.
inline pid_t start_program(const std::string& program, const std::string& dir, const Words& words,
                           const FaultRequest& request, const Surroundings& around) {
  return start_forked(request, [&] {
    around.enter();
    MOEBIUS_CHECK(io, ::chdir(dir.c_str()) == 0, "chdir to {}", dir);
    ::dup2(::open(around.out.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666), STDOUT_FILENO);
    ::dup2(::open(around.err.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0666), STDERR_FILENO);
    for (const auto& [name, value] : around.environment) ::setenv(name.c_str(), value.c_str(), 1);
    std::vector<char*> arguments{const_cast<char*>(program.c_str())};
    for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
    arguments.push_back(nullptr);
    ::execv(program.c_str(), arguments.data());
    const std::string why =
        fmt::format("{} cannot be started: {}; it belongs to the build of this test\n", program, errno_text(errno));
    std::fputs(why.c_str(), stderr);
    std::fflush(stderr);
    ::_exit(kNotStarted);
  });
}

// Starts moebius_faults with these words in `dir`.
inline pid_t start_program(const std::string& dir, const Words& words, const FaultRequest& request = {},
                           const Surroundings& around = {}) {
  return start_program(built_program("moebius_faults"), dir, words, request, around);
}

// The differences of a rank: its fault, its own overrides, the folder that it runs in, and variables.
struct RankIs {
  std::string fault;
  Words overrides = {};
  std::string dir = {};
  std::map<std::string, std::string> environment = {};
};

// A folder with a tiny dataset, for runs of the recipe tiny_cpu.
class TrainingRuns {
 public:
  explicit TrainingRuns(Words overrides) : words_(std::move(overrides)) {
    std::ofstream text(dir_.path("text"));
    for (int i = 0; i < 400; ++i) text << i * i << " is the square of " << i << ".\n";
    text.close();
    const pid_t build =
        start_program(dir_.path(), {"data", "build", "--input", "text", "--tokenizer", "bytes", "--out", "data"});
    EXPECT_EQ(end_of(build), 0) << err();
  }

  // `run` is the folder of the run.
  Words words_of(const std::string& run, const Words& overrides = {}) const {
    Words words{"train", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml"};
    const Words data{"data.train=[\"data\"]", "data.valid=[\"data\"]"};
    for (const std::string& each : joined(joined(data, words_), overrides)) words = joined(words, {"--set", each});
    return joined(words, {"--set", "run.dir=" + run});
  }
  pid_t start(const std::string& run, const Words& overrides = {}, const FaultRequest& request = {}) const {
    return start_program(dir_.path(), words_of(run, overrides), request);
  }
  int train(const std::string& run, const Words& overrides = {}, const FaultRequest& request = {}) const {
    return end_of(start(run, overrides, request));
  }

  std::string path(const std::string& name) const { return dir_.path(name); }
  std::string err() const { return read_file(path("err")); }  // output of the program that was started last

  int64_t num_lines(const std::string& run) const {
    std::ifstream file(path(run + "/metrics.jsonl"));
    return std::count(std::istreambuf_iterator<char>(file), {}, '\n');
  }
  void wait_for_lines(const std::string& run, int64_t lines) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (num_lines(run) < lines && std::chrono::steady_clock::now() < end) ::usleep(500);
    ASSERT_GE(num_lines(run), lines);
  }

  // Returns the metrics of a run, one string per line, without values that depend on a clock
  // or the machine.
  std::vector<std::string> metrics(const std::string& run) const {
    std::vector<std::string> records;
    std::ifstream file(path(run + "/metrics.jsonl"));
    for (std::string line; std::getline(file, line);) {
      auto record = nlohmann::ordered_json::parse(line);
      for (const char* key :
           {"step_time_s", "tokens_per_s", "model_tflops_per_rank", "memory_peak_bytes", "ranks", "comm", "links"})
        record.erase(key);
      records.push_back(record.dump());
    }
    return records;
  }
  int64_t last_step(const std::string& run) const {
    return nlohmann::json::parse(metrics(run).back()).at("step").get<int64_t>();
  }
  std::string newest(const std::string& run) const {
    return newest_checkpoint(path(run + "/checkpoints"), nullptr).value_or("");
  }
  // Returns a hash of each tensor of the newest checkpoint, with every weight and every moment.
  std::map<std::string, std::string> state(const std::string& run) const {
    std::map<std::string, std::string> hashes;
    const CheckpointReader reader(newest(run));
    for (const auto& [name, tensor] : reader.tensors())
      for (const CheckpointPiece& piece : tensor.pieces) hashes[slice_name(name, piece.slice)] = piece.xxh3.at(0);
    return hashes;
  }
  // Expects that `run` equals one that was never disturbed.
  void expect_same(const std::string& run, const std::string& undisturbed) const {
    const std::vector<std::string> got = metrics(run), expected = metrics(undisturbed);
    const auto [here, there] = std::mismatch(got.begin(), got.end(), expected.begin(), expected.end());
    EXPECT_EQ(here == got.end() ? "the end" : *here, there == expected.end() ? "the end" : *there);
    EXPECT_TRUE(state(run) == state(undisturbed));
    for (const CheckpointInfo& info : list_checkpoints(path(run + "/checkpoints"))) EXPECT_EQ(info.problem, "");
  }

 private:
  TestDir dir_;
  Words words_;
};

}  // namespace moebius
