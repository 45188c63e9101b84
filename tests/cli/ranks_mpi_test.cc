// Commands whose ranks are processes that mpirun started.
#include <gmock/gmock.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/cli/program.h"

namespace moebius {
namespace {

// By default Open MPI refuses to run as root, which containers do. If there are more ranks than
// cores, waiting ranks must yield.
Ran mpirun_moebius(const TestDir& dir, int num_ranks, const std::vector<std::string>& words) {
  std::string command = "cd " + quoted(dir.path()) +
                        " && export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 "
                        "OMPI_MCA_mpi_yield_when_idle=1 && " MOEBIUS_MPIRUN " -n " +
                        std::to_string(num_ranks) + " " + quoted(built_program("moebius"));
  for (const std::string& word : words) command += " " + quoted(word);
  command += " < /dev/null > stdout 2> stderr";
  const int status = std::system(command.c_str());
  return {.code = WEXITSTATUS(status), .out = read_file(dir.path("stdout")), .err = read_file(dir.path("stderr"))};
}

TEST(CliOverMpi, GeneratesOneText) {
  const TestDir dir;
  const std::vector<std::string> words{"generate",     MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5",
                                       "--tokenizer",  "bytes",
                                       "--prompt",     "!!!",
                                       "--max-tokens", "9",
                                       "--dtype",      "f32"};
  const Ran alone = run_moebius(dir, words);
  ASSERT_EQ(alone.code, 0) << alone.err;
  std::vector<std::string> over_ranks = words;
  over_ranks.insert(over_ranks.end(), {"--set", "parallel.tp=2"});
  const Ran ran = mpirun_moebius(dir, 2, over_ranks);
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_EQ(ran.out, alone.out);
}

constexpr const char* kRecipe = R"(
[run]
dir = "run"
threads = 1
[model]
vocab_size = 257
hidden_size = 16
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
head_dim = 8
intermediate_size = 24
max_position_embeddings = 32
num_experts = 6
num_experts_per_tok = 2
moe_intermediate_size = 10
[data]
train = ["set"]
tokenizer = "bytes"
[train]
steps = 2
global_batch = 6
micro_batch = 1
seq_len = 16
[optimizer]
lr = 1e-2
[parallel]
pp = 2
ep = 3
)";

TEST(CliOverMpi, RanksOfDifferentCommandsAreFoundAtTheStart) {
  const TestDir dir;
  write_file_atomic(dir.path("recipe.toml"), kRecipe);
  const Ran ran = mpirun_moebius(dir, 1,
                                 {"train", "recipe.toml", ":", "-n", "1", built_program("moebius"), "eval",
                                  MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5", "--data", "set"});
  EXPECT_EQ(ran.code, 2) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("error: the ranks do not agree on the command and the program's file (XXH3): "
                                          "rank 0 against rank 1; line 1 of rank 0 is \"train of "));
  EXPECT_EQ(ran.err.find("error: "), ran.err.rfind("error: ")) << ran.err;
}

// 6 ranks, 3 of them on a stage. Every line has slow ranks, waiting ranks and busy experts
// of all six.
TEST(CliOverMpi, EachLineOfTheMetricsHasAllRanks) {
  const TestDir dir;
  write_file_atomic(dir.path("text"), std::string(3000, 'a') + std::string(3000, 'b'));
  write_file_atomic(dir.path("recipe.toml"), kRecipe);
  ASSERT_EQ(run_moebius(dir, {"data", "build", "--input", "text", "--tokenizer", "bytes", "--out", "set"}).code, 0);
  const Ran ran = mpirun_moebius(dir, 6, {"train", "recipe.toml"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err,
              testing::HasSubstr("communication of the last step, sent and waited, each the maximum over ranks: pp "));
  std::istringstream lines(read_file(dir.path("run/metrics.jsonl")));
  int num_lines = 0;
  for (std::string line; std::getline(lines, line); ++num_lines) {
    const auto json = nlohmann::json::parse(line);
    for (const char* times : {"load_s", "passes_s", "optimizer_s", "waiting_s"})
      EXPECT_EQ(json.at("ranks").at(times).size(), 6u) << times;
    const auto seconds = [&](const char* times, int rank) { return json.at("ranks").at(times).at(rank).get<double>(); };
    for (int r = 0; r < 6; ++r) {
      EXPECT_GT(seconds("passes_s", r), 0);
      EXPECT_LT(seconds("waiting_s", r), seconds("passes_s", r) + seconds("optimizer_s", r)) << line;
    }
    for (const char* axis : {"pp", "pp_back", "ep", "dp_cp"}) {
      EXPECT_GT(json.at("comm").at(axis).at("sent_bytes").get<int64_t>(), 0) << axis;
      EXPECT_GE(json.at("comm").at(axis).at("exposed_s").get<double>(), 0) << axis;
    }
    EXPECT_FALSE(json.at("comm").contains("tp"));
    int64_t tokens = 0;
    ASSERT_EQ(json.at("tokens_of_ep_rank").size(), 3u);
    for (const auto& of_rank : json.at("tokens_of_ep_rank")) tokens += of_rank.get<int64_t>();
    EXPECT_EQ(tokens, 6 * 16 * 2 * 2) << "sequences, tokens, experts of each, layers";
  }
  EXPECT_EQ(num_lines, 2);
}

}  // namespace
}  // namespace moebius
