// The program as a user meets it: exit codes, messages, results on standard output.
#include <fmt/core.h>

#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <filesystem>

#include "comm/transport/mpi.h"
#include "device/accelerator.h"
#include "device/gpus_found.h"
#include "io/json_text.h"
#include "io/safetensors.h"
#include "ops/attention/attention_cudnn.h"
#include "ops/gemm/cublas_lt.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;
const std::string kCase = MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5";

// Makes a copy of the golden model that a test may damage.
std::string copy_model(const TestDir& dir) {
  fs::create_directory(dir.path("model"));
  for (const char* file : {"config.json", "model.safetensors"}) fs::copy(kCase + "/" + file, dir.path("model"));
  return dir.path("model");
}

std::string write_tokens(const TestDir& dir, const std::vector<int32_t>& ids) {
  const std::string path = dir.path("tokens.safetensors");
  write_safetensors(path, {{{"tokens", DType::i32, {1, static_cast<int64_t>(ids.size())}}, ids.data()}});
  return path;
}

// -- usage -----------------------------------------------------------------------------------------------

TEST(Cli, MissingCommandIsAUsageError) {
  TestDir dir;
  EXPECT_EQ(run_moebius(dir, {}).code, 2);
  EXPECT_EQ(run_moebius(dir, {"fly"}).code, 2);
  EXPECT_EQ(run_moebius(dir, {"eval"}).code, 2);
  EXPECT_EQ(run_moebius(dir, {"forward", kCase, "--tokens", "t", "--out", "o", "--gradients"}).code, 2);
}

TEST(Cli, UsageErrorsHaveTheFormOfOtherErrors) {
  TestDir dir;
  const auto refused = [&](const std::vector<std::string>& words, const std::string& text) {
    const Ran ran = run_moebius(dir, words);
    expect_refused(ran, 2, text);
    EXPECT_TRUE(ran.err.starts_with("error: moebius")) << ran.err;
    EXPECT_EQ(std::count(ran.err.begin(), ran.err.end(), '\n'), 1) << ran.err;
  };
  refused({"eval"}, "error: moebius eval: MODEL is required; moebius eval --help lists its arguments\n");
  refused({"checkpoint", "ls", ".", "--fast"}, "error: moebius checkpoint ls: ");
  refused({"config", "--ranks", "two"}, "--ranks: expected a whole number in decimal digits");
  refused({"config", "--ranks", "010"}, "--ranks: expected a whole number in decimal digits");
  refused({"generate", "model", "--max-tokens", "0x2"}, "--max-tokens: expected a whole number in decimal digits");
  refused({"eval", "model", "--data", "x", "--batch", "9223372036854775808"},
          " to 9223372036854775807; got 9223372036854775808");
  refused({"upcycle", "m", "out", "--experts", "2", "--top-k", "1", "--seed", "-1"},
          "--seed: expected a whole number from 0 to ");
  for (const std::string command : {"export", "import", "upcycle"}) {
    std::vector<std::string> words{command, "model", "out", "--shard-bytes", "0"};
    if (command == "upcycle") words.insert(words.end(), {"--experts", "4", "--top-k", "2"});
    const Ran ran = run_moebius(dir, words);
    expect_refused(ran, 2, "error: --shard-bytes: expected at least 1; got 0\n");
  }
  const Ran help = run_moebius(dir, {"eval", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, testing::HasSubstr("--data"));
}

TEST(Cli, RecipeKeyAsAnOptionGivesAHint) {
  TestDir dir;
  const std::string with = "; a key of the recipe is set with --set ";
  expect_refused(run_moebius(dir, {"train", "recipe.toml", "--steps", "5"}), 2, "--steps" + with + "train.steps=5; ");
  expect_refused(run_moebius(dir, {"config", "--steps=5", "recipe.toml"}), 2, "--steps=5" + with + "train.steps=5; ");
  expect_refused(run_moebius(dir, {"eval", "model", "--data", "x", "--ep", "2"}), 2, with + "parallel.ep=2; ");
  // Its --set takes keys of [parallel] alone.
  const Ran steps = run_moebius(dir, {"eval", "model", "--data", "x", "--steps", "2"});
  EXPECT_EQ(steps.code, 2);
  EXPECT_THAT(steps.err, testing::Not(testing::HasSubstr("train.steps")));
  expect_refused(run_moebius(dir, {"train", "recipe.toml", "--rank", "2"}), 2,
                 "; did you mean --ranks or --set lora.rank=2?; ");
}

TEST(CliData, MakesTheFolderOfItsOutput) {
  TestDir dir;
  write_file_atomic(dir.path("book.txt"), "a text");
  EXPECT_EQ(
      run_moebius(dir, {"data", "build", "--input", "book.txt", "--tokenizer", "bytes", "--out", "new/folder/set"})
          .code,
      0);
  EXPECT_EQ(run_moebius(dir, {"data", "info", "new/folder/set"}).code, 0);
  expect_refused(
      run_moebius(dir, {"data", "build", "--input", "nope.txt", "--tokenizer", "bytes", "--out", "other/set"}), 3,
      "nope.txt");
  EXPECT_FALSE(std::filesystem::exists(dir.path("other")));
  write_file_atomic(dir.path("m.ndjson"), "{}");
  expect_refused(run_moebius(dir, {"data", "build", "--input", "m.ndjson", "--tokenizer", "bytes", "--out", "set"}), 2,
                 "got .ndjson");
}

TEST(Cli, HelpGoesToStandardOutput) {
  TestDir dir;
  const Ran ran = run_moebius(dir, {"--help"});
  EXPECT_EQ(ran.code, 0);
  for (const char* command :
       {"eval", "generate", "forward", "data", "tokenize", "checkpoint", "config", "bench", "doctor"}) {
    EXPECT_THAT(ran.out, testing::HasSubstr(command));
  }
  EXPECT_THAT(ran.out, testing::HasSubstr("docs/reference/commands.md describes all commands"));
}

TEST(Cli, HelpEndsWithAnExample) {
  TestDir dir;
  for (const char* command : {"train", "config", "plan", "eval", "generate", "chat", "forward", "tokenize", "import",
                              "export", "upcycle", "report", "watch", "bench", "checkpoint", "doctor"})
    EXPECT_THAT(run_moebius(dir, {command, "--help"}).out, testing::ContainsRegex("\nExample:\n  .*moebius "))
        << command;
  for (const char* of_data : {"build", "info", "show"})
    EXPECT_THAT(run_moebius(dir, {"data", of_data, "--help"}).out, testing::HasSubstr("\nExample:\n  moebius data "));
}

// -- forward ---------------------------------------------------------------------------------------------

TEST(CliForward, ReportEqualsTheWrittenFile) {
  TestDir dir;
  const auto json = json_of(run_moebius(
      dir, {"forward", kCase, "--tokens", kCase + "/tokens.safetensors", "--out", "out.safetensors", "--json"}));
  const SafetensorsFile out = SafetensorsFile::open(dir.path("out.safetensors")),
                        want = SafetensorsFile::open(kCase + "/expected.safetensors");
  float loss = 0, want_loss = 0;
  out.read(out.at("loss"), &loss);
  want.read(want.at("loss"), &want_loss);
  EXPECT_NEAR(loss, want_loss, 1e-6 * want_loss);
  EXPECT_NEAR(json.at("loss").get<double>(), loss, 1e-6);
  EXPECT_EQ(out.at("logits").shape, want.at("logits").shape);
  for (const SafetensorsEntry& entry : out.entries()) EXPECT_FALSE(entry.name.starts_with("grad.")) << entry.name;
}

TEST(CliForward, AcceptsI64Ids) {
  TestDir dir;
  const std::vector<int64_t> ids{1, 2, 3};
  write_safetensors(dir.path("t.safetensors"), {{{"tokens", DType::i64, {1, 3}}, ids.data()}});
  EXPECT_EQ(run_moebius(dir, {"forward", kCase, "--tokens", "t.safetensors", "--out", "o.safetensors"}).code, 0);
}

TEST(CliForward, RefusesBadRequests) {
  TestDir dir;
  const std::string tokens = kCase + "/tokens.safetensors";
  const auto forward = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"forward", kCase, "--tokens", tokens, "--out", "o.safetensors"};
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  if (const std::string why = Accelerator::why_missing(); !why.empty())
    expect_refused(forward({"--device", "cuda"}), 2, "--device: " + why);
  expect_refused(forward({"--device", "tpu"}), 2, "expected cpu or cuda; got \"tpu\"");
  expect_refused(forward({"--dtype", "f8"}), 2, "--dtype: expected f32 or bf16; got \"f8\"");
  expect_refused(forward({"--threads", "-3"}), 2, "--threads: expected 0 or more; got -3");
  EXPECT_FALSE(fs::exists(dir.path("o.safetensors")));
}

TEST(CliForward, RefusesBadTokens) {
  TestDir dir;
  const auto forward = [&](const std::string& tokens) {
    return run_moebius(dir, {"forward", kCase, "--tokens", tokens, "--out", "o.safetensors"});
  };
  expect_refused(forward(write_tokens(dir, {1, 97, 3})), 3, "tokens: expected values in [0, 97); got 97 at [0, 1]");
  expect_refused(forward(write_tokens(dir, {1, 2, -4})), 3, "got -4 at [0, 2]");
  expect_refused(forward(write_tokens(dir, {5})), 3, "at least one row of two tokens");
  expect_refused(forward("none.safetensors"), 3, "none.safetensors");
  expect_refused(forward(kCase + "/model.safetensors"), 3, "tokens");

  const std::vector<float> floats{1, 2};
  write_safetensors(dir.path("f.safetensors"), {{{"tokens", DType::f32, {1, 2}}, floats.data()}});
  expect_refused(forward("f.safetensors"), 3, "tokens: expected I32 or I64; got F32");
  const std::vector<int32_t> ids{1, 2, 3}, starts{0, 2, 2};
  write_safetensors(dir.path("d.safetensors"),
                    {{{"tokens", DType::i32, {1, 3}}, ids.data()}, {{"doc_start", DType::i32, {1, 3}}, starts.data()}});
  expect_refused(forward("d.safetensors"), 3, "doc_start: expected the index of the first token");
  EXPECT_FALSE(fs::exists(dir.path("o.safetensors")));
}

TEST(CliForward, RefusesDamagedModels) {
  TestDir dir;
  const std::string model = copy_model(dir), weights = model + "/model.safetensors",
                    tokens = kCase + "/tokens.safetensors";
  const auto forward = [&] {
    return run_moebius(dir, {"forward", model, "--tokens", tokens, "--out", "o.safetensors"});
  };
  const std::string whole = read_file(weights);
  write_file_atomic(weights, whole.substr(0, whole.size() - 1));
  expect_refused(forward(), 3, weights);
  write_file_atomic(weights, "\xff\xff\xff\xff\xff\xff\xff\xff{}");
  expect_refused(forward(), 3, weights);
  write_file_atomic(weights, whole);
  write_file_atomic(model + "/config.json", "{\"model_type\": \"bert\"}");
  expect_refused(forward(), 3, "bert");
  fs::remove(weights);
  fs::remove(model + "/config.json");
  expect_refused(forward(), 3, "expected a Hugging Face folder (config.json)");
  expect_refused(run_moebius(dir, {"forward", "nowhere", "--tokens", tokens, "--out", "o"}), 3, "got nothing there");
}

TEST(CliForward, RefusesAnOutputThatCannotBeWritten) {
  TestDir dir;
  const Ran ran = run_moebius(
      dir, {"forward", kCase, "--tokens", kCase + "/tokens.safetensors", "--out", "no/such/folder/o.safetensors"});
  EXPECT_EQ(ran.code, 4) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("no/such/folder"));
}

// -- data, tokenize --------------------------------------------------------------------------------------

TEST(CliData, BuildsInfoAndEvaluates) {
  TestDir dir;
  // The dataset is written by hand. It has bytes below 97, the vocabulary of the golden model, and
  // no end of document.
  write_file_atomic(dir.path("text.txt"), std::string(200, '!'));
  const auto built = json_of(
      run_moebius(dir, {"data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "set", "--json"}));
  EXPECT_EQ(built.at("documents"), 1);
  EXPECT_EQ(built.at("tokens"), 201);
  EXPECT_EQ(built.at("text_bytes"), 200);
  const auto info = json_of(run_moebius(dir, {"data", "info", "set", "--json"}));
  EXPECT_EQ(info.at("tokens"), 201);
  EXPECT_EQ(info.at("tokenizer"), "bytes");
  EXPECT_EQ(info.at("token_type"), "u16");

  // 25 sequences of 8 tokens read 201. The last one holds the end id, 256, which is outside the
  // model's vocabulary.
  const std::vector<std::string> eval{"eval", kCase,     "--data", "set",     "--seq-len",
                                      "8",    "--batch", "4",      "--dtype", "f32"};
  expect_refused(run_moebius(dir, eval), 3,
                 "--data: set: expected token ids in [0, 97), the model's vocabulary; got 256 as the largest id in");
  // Datasets that were built earlier do not say their largest id.
  auto sidecar = read_json(dir.path("set.json"));
  sidecar.erase("largest_id");
  write_file_atomic(dir.path("set.json"), sidecar.dump());
  expect_refused(run_moebius(dir, eval), 3, "got 256 at token 200");
  std::vector<std::string> few = eval;
  few.insert(few.end(), {"--max-batches", "3", "--json"});
  const auto result = json_of(run_moebius(dir, few));
  EXPECT_EQ(result.at("tokens"), 96);
  EXPECT_NEAR(result.at("perplexity").get<double>(), std::exp(result.at("loss").get<double>()), 1e-6);
  // 201 tokens represent 200 bytes.
  EXPECT_NEAR(result.at("bits_per_byte").get<double>(), result.at("loss").get<double>() / std::log(2.0) * 201 / 200,
              1e-9);
}

TEST(CliData, MissingFilesAreRefused) {
  TestDir dir;
  expect_refused(run_moebius(dir, {"data", "build", "--input", "none.txt", "--tokenizer", "bytes", "--out", "set"}), 3,
                 "none.txt");
  expect_refused(run_moebius(dir, {"data", "info", "set"}), 3, "set");
  write_file_atomic(dir.path("made.idx"), "");
  expect_refused(run_moebius(dir, {"data", "info", "made.bin"}), 3, "got one of its files; leave .bin out: made");
  expect_refused(run_moebius(dir, {"eval", kCase, "--data", "set"}), 3, "set");
  EXPECT_EQ(run_moebius(dir, {"data"}).code, 2);
  write_file_atomic(dir.path("t.txt"), "text");
  expect_refused(run_moebius(dir, {"data", "build", "--input", "t.txt", "--tokenizer", "folder", "--out", "set"}), 3,
                 "tokenizer");
}

TEST(CliTokenize, RoundTripsLineByLine) {
  TestDir dir;
  const Ran ids = run_moebius(dir, {"tokenize", "--tokenizer", "bytes"}, "ab\n\nc \xc3\xa9\n");
  EXPECT_EQ(ids.code, 0) << ids.err;
  EXPECT_EQ(ids.out, "97 98\n\n99 32 195 169\n");
  EXPECT_EQ(run_moebius(dir, {"tokenize", "--tokenizer", "bytes", "--decode"}, ids.out).out, "ab\n\nc \xc3\xa9\n");
  expect_refused(run_moebius(dir, {"tokenize", "--tokenizer", "bytes", "--decode"}, "12 x7\n"), 3,
                 "standard input:1: expected ids with spaces between them; got \"x7\"");
  EXPECT_NE(run_moebius(dir, {"tokenize", "--tokenizer", "bytes", "--decode"}, "999\n").code, 0);
}

TEST(CliTokenize, UsesTheTokenizerOfAModelFolder) {
  TestDir dir;
  const std::string model = MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/llama2";
  std::filesystem::copy(model + "/tokenizer.json", dir.path("tokenizer.json"));
  const Ran ids = run_moebius(dir, {"tokenize", "--tokenizer", "."}, "And God said\n<s>\n");
  EXPECT_EQ(ids.code, 0) << ids.err;
  EXPECT_EQ(run_moebius(dir, {"tokenize", "--tokenizer", ".", "--decode"}, ids.out).out, "And God said\n\n");
  write_file_atomic(dir.path("t.txt"), "And God said </s>");
  const std::vector<std::string> build{"data", "build", "--input", "t.txt", "--tokenizer",
                                       ".",    "--out", "set",     "--json"};
  expect_refused(run_moebius(dir, build), 3, "expected an end-of-document token");
  write_file_atomic(dir.path("tokenizer_config.json"), "{\"eos_token\": \"</s>\"}");
  const Ran letters = run_moebius(dir, build);
  EXPECT_THAT(letters.err, testing::HasSubstr("warning: 1 document spells out special tokens such as \"</s>\""));
  const auto plain = json_of(letters).at("tokens").get<int64_t>();
  std::vector<std::string> with_special = build;
  with_special.insert(with_special.end(), {"--parse-special", "--force"});
  const Ran tokens = run_moebius(dir, with_special);
  EXPECT_THAT(tokens.err, testing::Not(testing::HasSubstr("spells out")));
  EXPECT_GT(plain, json_of(tokens).at("tokens").get<int64_t>());
}

// A fine-tuning left its lengths in tokenizer.json. The ids are the same, and every command that
// encodes prints a warning.
TEST(CliTokenize, TruncationAndPaddingGiveAWarning) {
  TestDir dir;
  const std::string model = MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/gpt2";
  nlohmann::json file = read_json(model + "/tokenizer.json");
  file["truncation"] = {{"direction", "Right"}, {"max_length", 2}, {"strategy", "LongestFirst"}, {"stride", 0}};
  file["padding"] = {{"strategy", {{"Fixed", 64}}}, {"direction", "Right"}, {"pad_id", 0}, {"pad_token", "!"}};
  write_file_atomic(dir.path("tokenizer.json"), file.dump());
  write_file_atomic(dir.path("tokenizer_config.json"), R"({"eos_token": "<|endoftext|>"})");
  write_file_atomic(dir.path("t.txt"), "In the beginning God created");
  const std::string said =
      "tokenizer.json: truncation and padding are not applied: ids are neither truncated nor padded";
  const Ran ids = run_moebius(dir, {"tokenize", "--tokenizer", "."}, "In the beginning\n");
  EXPECT_EQ(ids.code, 0);
  EXPECT_THAT(ids.err, testing::HasSubstr(said));
  EXPECT_EQ(ids.out, run_moebius(dir, {"tokenize", "--tokenizer", model}, "In the beginning\n").out);
  EXPECT_THAT(run_moebius(dir, {"data", "build", "--input", "t.txt", "--tokenizer", ".", "--out", "set"}).err,
              testing::HasSubstr(said));
}

// -- generate --------------------------------------------------------------------------------------------

TEST(CliGenerate, SameSeedSameText) {
  TestDir dir;
  const auto words = [](const std::string& seed) {
    return std::vector<std::string>{"generate", kCase,     "--tokenizer", "bytes",  "--prompt", "!!", "--max-tokens",
                                    "12",       "--dtype", "f32",         "--json", "--seed",   seed};
  };
  const auto first = json_of(run_moebius(dir, words("1")));
  EXPECT_EQ(first.at("tokens").size(), 12u);
  EXPECT_EQ(json_of(run_moebius(dir, words("1"))), first);
  EXPECT_NE(json_of(run_moebius(dir, words("2"))).at("tokens"), first.at("tokens"));
}

// Heads, the vocabulary (97 ids on two ranks), experts, their width and layers are divided over
// ranks. The tokens are those of one rank.
TEST(CliGenerate, AnyLayoutWritesTheSame) {
  TestDir dir;
  const auto generate = [&](const std::vector<std::string>& more) {
    std::vector<std::string> words{"generate", kCase,          "--tokenizer", "bytes",   "--prompt",
                                   "!!!",      "--max-tokens", "9",           "--dtype", "f32"};
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  const Ran alone = generate({});
  ASSERT_EQ(alone.code, 0) << alone.err;
  const auto json = json_of(generate({"--json"}));
  for (const std::vector<std::string>& layout :
       std::vector<std::vector<std::string>>{{"parallel.tp=2"},
                                             {"parallel.pp=2", "parallel.layout=E t*2 | t L"},
                                             {"parallel.ep=2"},
                                             {"parallel.etp=2"}}) {
    std::vector<std::string> words{"--ranks", "2"};
    for (const std::string& each : layout) words.insert(words.end(), {"--set", each});
    const Ran ran = generate(words);
    EXPECT_EQ(ran.code, 0) << ran.err;
    EXPECT_EQ(ran.out, alone.out) << layout[0];  // printed once, not by each rank
    words.emplace_back("--json");
    EXPECT_EQ(json_of(generate(words)), json) << layout[0];
  }
  expect_refused(generate({"--ranks", "2"}), 2,
                 "generate: expected a layout that splits the model over 2 ranks; got none, so that each rank would "
                 "compute the same; use --set parallel.tp=2, or start one rank");
  for (const std::string tp : {"1", "2"})
    expect_refused(
        generate({"--ranks", tp == "1" ? "2" : "4", "--set", "parallel.tp=" + tp, "--set", "parallel.cp=2"}), 2,
        "error: generate: expected parallel.cp = 1, because the tokens of a sequence come one by one; got 2");
  expect_refused(generate({"--ranks", "4", "--set", "parallel.tp=2"}), 2,
                 "error: generate: expected 2 ranks, parallel.tp * pp = 2 * 1 times those that ep * etp = 1 * 1 needs "
                 "in addition to tp; got 4, of which the others would repeat the work; start 2, or split the model "
                 "further");
  expect_refused(generate({"--ranks", "2", "--set", "train.seq_len=3"}), 2,
                 "generate --set: expected a key of [parallel], as in parallel.tp=2; got train.seq_len=3");
  expect_refused(generate({"--ranks", "2", "--set", "parallel.tp=4"}), 2, "tp * cp * pp = 4 * 1 * 1; got 2;");
  expect_refused(generate({"--ranks", "2", "--set", "parallel.tp=2", "--temperature", "-1"}), 2,
                 "error: generate: temperature must be 0 or more; got -1");  // names no rank
  expect_refused(generate({"--ranks", "3", "--set", "parallel.tp=3"}), 2, "error: attention: ");
}

TEST(CliGenerate, NeedsATokenizerAndWarnsOfAnother) {
  TestDir dir;
  expect_refused(run_moebius(dir, {"generate", kCase, "--prompt", "!"}), 3,
                 "generate: expected a tokenizer.json in the model's folder; " + kCase +
                     " has none; give --tokenizer "
                     "DIR, or --tokenizer bytes for a model of bytes");
  const std::string model = copy_model(dir), said = "--tokenizer bytes is not the tokenizer of the model, " + model;
  const std::vector<std::string> words{"generate", model, "--tokenizer", "bytes", "--prompt", "!", "--max-tokens", "1"};
  Ran ran = run_moebius(dir, words);
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, testing::Not(testing::HasSubstr(said))) << "whose tokenizer is not known";
  fs::copy(MOEBIUS_SOURCE_DIR "/tests/golden/data/tokenizers/gpt2/tokenizer.json", model);
  ran = run_moebius(dir, words);
  EXPECT_EQ(ran.code, 0) << ran.err;
  EXPECT_THAT(ran.err, testing::HasSubstr("warning: " + said));
}

TEST(CliGenerate, RefusesInvalidRequests) {
  TestDir dir;
  const auto generate = [&](std::vector<std::string> more) {
    std::vector<std::string> words{"generate", kCase, "--tokenizer", "bytes", "--prompt", "!"};
    words.insert(words.end(), more.begin(), more.end());
    return run_moebius(dir, words);
  };
  expect_refused(generate({"--max-tokens", "64"}), 2, "must fit the context of 64 tokens; got 1 + 64");
  expect_refused(generate({"--max-tokens", "3", "--temperature", "-1"}), 2, "temperature");
  expect_refused(generate({"--max-tokens", "3", "--top-p", "1.5"}), 2, "top-p");
  expect_refused(run_moebius(dir, {"generate", kCase, "--tokenizer", "bytes", "--prompt", "z", "--max-tokens", "3"}), 3,
                 "expected prompt ids in [0, 97); got 122");
}

// -- checkpoint ------------------------------------------------------------------------------------------

TEST(CliCheckpoint, EmptyAndMissingFolders) {
  TestDir dir;
  for (const char* command : {"ls", "verify"})
    expect_refused(
        run_moebius(dir, {"checkpoint", command, "."}), 3,
        fmt::format("checkpoint {}: expected a checkpoint or a folder of them; got none in .; check the path",
                    command));
  const int64_t num_files = dir.num_files();
  expect_refused(run_moebius(dir, {"checkpoint", "prune", "."}), 3,
                 "checkpoint prune: expected a folder of checkpoints; got none in .; check the path");
  EXPECT_EQ(dir.num_files(), num_files) << "nothing is written to a wrong folder";
  expect_refused(run_moebius(dir, {"checkpoint", "ls", "nowhere"}), 3, "got nothing there");
  expect_refused(run_moebius(dir, {"checkpoint", "prune", ".", "--keep", "0"}), 2,
                 "expected at least 1 to be kept; got 0");
}

// Makes a run, and then everything that reads its checkpoint.
TEST(CliRun, EveryCommandAcceptsTheFolderOfARun) {
  TestDir dir;
  std::string text;
  for (int i = 0; i < 40; ++i) text += fmt::format("line {} of a small text\n", i);
  write_file_atomic(dir.path("text.txt"), text);
  ASSERT_EQ(run_moebius(dir, {"data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "set"}).code, 0);
  const Ran trained = run_moebius(dir, {"train", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--set", "run.dir=run",
                                        "--set", "data.train=[\"set\"]", "--set", "train.steps=6"});
  ASSERT_EQ(trained.code, 0) << trained.err;

  const auto list = json_of(run_moebius(dir, {"checkpoint", "ls", "run", "--json"})).at("checkpoints");
  ASSERT_EQ(list.size(), 1u);
  EXPECT_EQ(list[0].at("step"), 6);
  EXPECT_EQ(json_of(run_moebius(dir, {"checkpoint", "verify", "run", "--json"})).at("ok"), true);
  EXPECT_EQ(json_of(run_moebius(dir, {"checkpoint", "prune", "run", "--keep", "1", "--json"})).at("removed").size(),
            0u);

  const Ran tensors = run_moebius(dir, {"checkpoint", "ls", list[0].at("folder").get<std::string>()});
  EXPECT_THAT(tensors.out, testing::HasSubstr("\nmodel.layers.1.mlp.gate.weight  f32[8, 32]\n")) << tensors.err;
  EXPECT_THAT(tensors.out, testing::Not(testing::HasSubstr("adam_m.")));
  expect_refused(run_moebius(dir, {"export", "run", "out"}), 3,
                 "of model_type \"moebius\", for which Hugging Face has no class");

  // The sequence length and tokenizer of the run are read from the checkpoint.
  const auto evaluated = json_of(run_moebius(dir, {"eval", "run", "--data", "set", "--dtype", "f32", "--json"}));
  EXPECT_LT(evaluated.at("loss").get<double>(), std::log(257.0));
  const Ran generated = run_moebius(dir, {"generate", "run", "--prompt", "line", "--max-tokens", "5"});
  EXPECT_EQ(generated.code, 0) << generated.err;
  EXPECT_TRUE(generated.out.starts_with("line")) << generated.out;
  const std::string tokens = write_tokens(dir, {1, 2, 3});
  EXPECT_EQ(run_moebius(dir, {"forward", "run", "--tokens", tokens, "--out", "o.safetensors", "--grads"}).code, 0);

  const std::string shard = dir.path(list[0].at("folder").get<std::string>() + "/shard-00000.safetensors");
  std::string bytes = read_file(shard);
  bytes.back() ^= 1;
  write_file_atomic(shard, bytes);
  const Ran damaged = run_moebius(dir, {"checkpoint", "verify", "run"});
  EXPECT_EQ(damaged.code, 3);
  EXPECT_THAT(damaged.out, testing::HasSubstr("DAMAGED"));
}

// -- doctor ----------------------------------------------------------------------------------------------

TEST(CliRanks, AreRefusedIfTheirRecipeNeedsMissingGpus) {
  if (Accelerator::why_missing().empty()) GTEST_SKIP() << "this machine has a GPU: they would run";
  TestDir dir;
  expect_refused(run_moebius(dir, {"train", MOEBIUS_SOURCE_DIR "/recipes/tiny_cpu.toml", "--ranks", "2", "--set",
                                   "run.device=cuda"}),
                 2, "set run.device = \"cpu\"");
}

TEST(CliDoctor, ListsMissingParts) {
  TestDir dir;
  const auto json = json_of(run_moebius(dir, {"doctor", "--json"}));
  EXPECT_EQ(json.at("found").at("CUDA") == "not part of this build", !Accelerator::is_built_in());
  EXPECT_EQ(json.at("missing").contains("GPU"), !Accelerator::why_missing().empty());
  EXPECT_EQ(json.at("found").at("CUDA"), cuda_versions_text(gpus_found()));
  EXPECT_FALSE(json.at("found").at("oneDNN").get<std::string>().empty());
  EXPECT_EQ(json.at("found").at("MPI") == "not part of this build", mpi_version().empty());
  EXPECT_EQ(json.at("missing").contains("MPI"), mpi_version().empty());
  EXPECT_EQ(json.at("found").at("cuBLASLt"), cublas_lt_text());
  EXPECT_EQ(json.at("missing").contains("cuBLASLt"), !why_no_cublas_lt().empty());
  EXPECT_EQ(json.at("found").at("cuDNN"), cudnn_text(cudnn_version()));
  EXPECT_THAT(run_moebius(dir, {"doctor"}).out, testing::HasSubstr("-march="));
}

}  // namespace
}  // namespace moebius
