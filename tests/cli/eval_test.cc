// `moebius eval` as people run it: refused arguments, and how it ends.
#include <signal.h>

#include <cstring>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>

#include "data/token_data.h"
#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

const std::string kModel = MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5";

void write_dataset(const TestDir& dir, int64_t tokens) {
  TokenDatasetWriter writer(dir.path("set"), TokenType::u16);
  std::vector<int32_t> ids(tokens);
  for (int64_t i = 0; i < tokens; ++i) ids[i] = static_cast<int32_t>(i * 7 % 23);
  writer.add_tokens(ids);
  writer.end_document();
  writer.close();
}

Ran eval(const TestDir& dir, const std::vector<std::string>& words, const std::string& model = kModel) {
  std::vector<std::string> all{"eval", model, "--data", "set", "--threads", "1"};
  all.insert(all.end(), words.begin(), words.end());
  return run_moebius(dir, all);
}

TEST(CliEval, RefusesInvalidRequests) {
  TestDir dir;
  write_dataset(dir, 500);
  expect_refused(eval(dir, {"--batch", "0"}), 2, "--batch: expected at least 1; got 0");
  expect_refused(eval(dir, {"--batch", "9223372036854775807", "--seq-len", "64"}), 2,
                 "--batch: expected at most 33554431 sequences of 64 tokens; got 9223372036854775807");
  expect_refused(eval(dir, {"--max-batches", "-1"}), 2, "--max-batches: expected 0 or more; got -1");
  expect_refused(eval(dir, {"--seq-len", "-1"}), 2, "--seq-len: expected 0 or more; got -1");
  expect_refused(eval(dir, {"--seq-len", "100"}), 2,
                 "--seq-len: expected at most the model's max_position_embeddings = 64; got 100");
  EXPECT_EQ(eval(dir, {"--seq-len", "64"}).code, 0);
  expect_refused(run_moebius(dir, {"eval", kModel, "--data", "nowhere"}), 3,
                 "--data: nowhere: expected nowhere.bin and nowhere.idx; nowhere.bin is not there");
}

TEST(CliEval, ALossThatIsNotFiniteIsAnError) {
  TestDir dir;
  write_dataset(dir, 500);
  std::filesystem::create_directory(dir.path("model"));
  std::filesystem::copy(kModel + "/config.json", dir.path("model"));
  // The damage is after the routers, because no router can choose experts by NaN.
  const int64_t offset = SafetensorsFile::open(kModel + "/model.safetensors").at("model.norm.weight").offset;
  std::string bytes = read_file(kModel + "/model.safetensors");
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::memcpy(bytes.data() + offset, &nan, sizeof(nan));
  write_file_atomic(dir.path("model/model.safetensors"), bytes);
  const Ran ran = eval(dir, {}, "model");
  expect_refused(ran, 5, "eval: expected a finite loss on set; got nan");
  EXPECT_THAT(ran.err, testing::HasSubstr("warning: weights of model: expected finite numbers; got 1 that are NaN or "
                                          "infinite in 1 tensor (model.norm.weight)"));
}

// 500 tokens have 499 targets: 15 sequences of 32 and 19 more.
TEST(CliEval, ReportsTokensLeftOut) {
  TestDir dir;
  write_dataset(dir, 500);
  EXPECT_THAT(eval(dir, {"--seq-len", "32"}).out, testing::EndsWith("  over 480 tokens, 19 tokens left out\n"));
  const nlohmann::json json = json_of(eval(dir, {"--seq-len", "32", "--json"}));
  EXPECT_EQ(json.at("tokens_left_out"), 19);
  EXPECT_TRUE(json.at("tokens").is_number_integer());
  EXPECT_EQ(json.at("tokens"), 480);
  write_dataset(dir, 481);
  EXPECT_THAT(eval(dir, {"--seq-len", "32"}).out, testing::EndsWith("  over 480 tokens\n"));
}

double loss_of(const Ran& ran) {
  EXPECT_EQ(ran.code, 0) << ran.err;
  return std::atof(ran.out.c_str() + std::string("loss ").size());
}

// Like every deepseek_v3 saved by transformers, config.json mentions a module that the folder
// lacks. The loss is computed without it.
TEST(CliEval, EvaluatesWithoutMissingMultiTokenPrediction) {
  TestDir dir;
  write_dataset(dir, 500);
  const std::string whole = MOEBIUS_SOURCE_DIR "/tests/golden/data/deepseek_v3_v5";
  std::filesystem::create_directory(dir.path("model"));
  std::filesystem::copy(whole + "/model.safetensors", dir.path("model"));
  nlohmann::json config = nlohmann::json::parse(read_file(whole + "/config.json"));
  config["num_nextn_predict_layers"] = 1;
  write_file_atomic(dir.path("model/config.json"), config.dump());
  const double loss = loss_of(eval(dir, {}, whole));
  EXPECT_EQ(loss_of(eval(dir, {}, "model")), loss);
  EXPECT_EQ(run_moebius(dir, {"import", "model", "checkpoint"}).code, 0);
  EXPECT_EQ(loss_of(eval(dir, {}, "checkpoint")), loss);
}

// Sequences, tokens of a sequence, heads, experts and layers are divided over ranks. The loss is
// the same up to the order of sums.
// One batch is left for a single data rank.
TEST(CliEval, LossIsTheSameOnAnyLayout) {
  TestDir dir;
  write_dataset(dir, 1500);
  const auto loss = [&](std::vector<std::string> words) {
    for (const char* word : {"--dtype", "f32", "--batch", "2", "--seq-len", "32"}) words.emplace_back(word);
    return loss_of(eval(dir, words));
  };
  const double alone = loss({});
  EXPECT_GT(alone, 0);
  EXPECT_NEAR(loss({"--ranks", "2"}), alone, 2e-6);
  for (const std::vector<std::string>& layout :
       std::vector<std::vector<std::string>>{{"parallel.tp=2"},
                                             {"parallel.cp=2"},
                                             {"parallel.ep=2", "parallel.dispatcher=alltoall"},
                                             {"parallel.pp=2", "parallel.layout=E t*2 | t L"},
                                             {"parallel.etp=2"}}) {
    std::vector<std::string> words{"--ranks", "2"};
    for (const std::string& each : layout) words.insert(words.end(), {"--set", each});
    EXPECT_NEAR(loss(words), alone, 2e-6) << layout[0];
  }
  expect_refused(eval(dir, {"--ranks", "2", "--set", "train.steps=3"}), 2,
                 "eval --set: expected a key of [parallel], as in parallel.tp=2; got train.steps=3");
  expect_refused(eval(dir, {"--ranks", "2", "--set", "parallel.tp=4"}), 2, "tp * cp * pp = 4 * 1 * 1; got 2;");
}

// The batches would take minutes. Only the signal ends the command in time, with an exit
// code for signals.
TEST(CliEval, ASignalEndsItBetweenBatches) {
  for (const int signal : {SIGTERM, SIGINT}) {
    TestDir dir;
    write_dataset(dir, 5'000'000);
    const Ran ran = run_and_signal(dir, {"eval", kModel, "--data", "set", "--batch", "1", "--threads", "1"}, signal);
    EXPECT_EQ(ran.code, 128 + signal);
    EXPECT_EQ(ran.out, "");
    EXPECT_THAT(ran.err, testing::HasSubstr(fmt::format("signal {}: ending after", signal)));
  }
}

}  // namespace
}  // namespace moebius
