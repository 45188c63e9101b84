// A dense model becomes a Mixture of Experts, and trains on one rank and on several.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <sstream>

#include "data/token_data.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

const std::string kDense = MOEBIUS_SOURCE_DIR "/tests/golden/data/llama_v4";

constexpr const char* kRecipe = R"([run]
dir = "run"
[model]
hf = "moe"
init_from = "moe"
[data]
train = ["set"]
[train]
steps = 5
global_batch = 4
micro_batch = 1
seq_len = 16
[optimizer]
lr = 3e-3
warmup_steps = 0
[moe]
balance = "aux"
aux_coeff = 1e-2
[precision]
compute = "f32"
)";

class CliUpcycle : public testing::Test {
 protected:
  void SetUp() override {
    write_file_atomic(dir_.path("recipe.toml"), kRecipe);
    std::vector<int32_t> ids(400);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i * i % 89);
    TokenDatasetWriter writer(dir_.path("set"), TokenType::u16);
    writer.add_tokens(ids);
    writer.end_document();
    writer.close();
    const Ran ran =
        run_moebius(dir_, {"upcycle", kDense, "moe", "--experts", "8", "--top-k", "4", "--granularity", "2"});
    ASSERT_EQ(ran.code, 0) << ran.err;
    EXPECT_THAT(ran.err, testing::HasSubstr("mixtral: 8 experts of width 14 per layer, 4 per token"));
  }
  std::vector<double> losses(const std::string& run, std::vector<std::string> words) {
    words.insert(words.begin(), {"train", "recipe.toml", "--set", "run.dir=" + run});
    const Ran ran = run_moebius(dir_, words);
    EXPECT_EQ(ran.code, 0) << ran.err;
    std::istringstream lines(read_file(dir_.path(run + "/metrics.jsonl")));
    std::vector<double> losses;
    for (std::string line; std::getline(lines, line);)
      losses.push_back(nlohmann::json::parse(line).at("loss").get<double>());
    return losses;
  }
  TestDir dir_;
};

TEST_F(CliUpcycle, WarnsOfTies) {
  const Ran ran =
      run_moebius(dir_, {"upcycle", kDense, "ties", "--experts", "8", "--top-k", "3", "--granularity", "2"});
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("top-k 3 is not a multiple of granularity 2"));
  EXPECT_THAT(ran.err, testing::HasSubstr("a tie that transformers may break differently"));
}

TEST_F(CliUpcycle, TrainingResumesOnAnyRanks) {
  const std::vector<double> alone = losses("alone", {});
  ASSERT_EQ(alone.size(), 5u);
  EXPECT_LT(alone.back(), 0.9 * alone.front());
  const auto expect_same = [&](const std::string& run, const std::string& ranks, const std::string& layout) {
    std::vector<std::string> words{"--ranks", ranks};
    if (!layout.empty()) words.insert(words.end(), {"--set", layout});
    const std::vector<double> got = losses(run, words);
    ASSERT_EQ(got.size(), alone.size()) << run;
    for (size_t i = 0; i < got.size(); ++i) EXPECT_NEAR(got[i], alone[i], 1e-4 * alone[i]) << run << " step " << i;
  };
  expect_same("dp2", "2", "");
  expect_same("ep2", "2", "parallel.ep=2");
  expect_same("ep4", "4", "parallel.ep=4");
}

}  // namespace
}  // namespace moebius
