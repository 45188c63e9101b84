// The README's way through fine-tuning: a model in, trained on completions with parts frozen, out, and into
// transformers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "io/hf_folder.h"
#include "io/json_text.h"
#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

const std::string kGolden = MOEBIUS_SOURCE_DIR "/tests/golden/data";

constexpr const char* kModel = R"([run]
dir = "base"
[model]
model_type = "qwen3_moe"
vocab_size = 640
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
head_dim = 8
intermediate_size = 48
max_position_embeddings = 64
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 24
norm_topk_prob = true
[data]
train = ["text"]
tokenizer = "tokenizer"
[train]
steps = 2
global_batch = 2
micro_batch = 2
seq_len = 32
[optimizer]
lr = 1e-2
[precision]
compute = "bf16"
)";

constexpr const char* kFineTune = R"([run]
dir = "tuned"
[model]
hf = "model"
init_from = "imported"
[data]
train = ["prompts"]
valid = ["prompts"]
tokenizer = "model"
separate_documents = true
[train]
steps = 30
global_batch = 4
micro_batch = 2
seq_len = 48
freeze = ["*.mlp.gate.*", "model.embed_tokens.*"]
[optimizer]
lr = 5e-3
[moe]
balance = "aux"
aux_coeff = 1e-3
[precision]
compute = "bf16"
)";

class FineTune : public ::testing::Test {
 protected:
  // A model's folder as somebody else may have written it: bf16, with a tokenizer.
  void SetUp() override {
    fs::copy(kGolden + "/tokenizers/qwen2", dir_.path("tokenizer"));
    fs::remove(dir_.path("tokenizer/expected.json"));
    write_file_atomic(dir_.path("tokenizer/tokenizer_config.json"),
                      R"({"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})");
    std::string text, prompts;
    for (int i = 0; i < 40; ++i) {
      text += fmt::format("the light of day {} and the night {}\n", i * 7 % 11, i * 5 % 13);
      prompts += fmt::format("{{\"prompt\": \"day {0}?\", \"completion\": \" night {1}\"}}\n", i % 9, i % 9 + 1);
    }
    write_file_atomic(dir_.path("text.txt"), text);
    write_file_atomic(dir_.path("prompts.jsonl"), prompts);
    write_file_atomic(dir_.path("base.toml"), kModel);
    write_file_atomic(dir_.path("tune.toml"), kFineTune);
    run({"data", "build", "--input", "text.txt", "--tokenizer", "tokenizer", "--out", "text"});
    run({"train", "base.toml"});
    run({"export", "base", "model", "--dtype", "bf16", "--files", "tokenizer"});
  }
  Ran run(const std::vector<std::string>& words) {
    Ran ran = run_moebius(dir_, words);
    EXPECT_EQ(ran.code, 0) << words[0] << ": " << ran.err;
    return ran;
  }
  std::vector<char> tensor(const std::string& folder, const std::string& name) {
    const HfFolder model = HfFolder::open(dir_.path(folder));
    std::vector<char> bytes(model.at(name).bytes);
    model.read(name, bytes.data());
    return bytes;
  }
  double eval_loss(const std::string& model) {
    return nlohmann::json::parse(run({"eval", model, "--data", "prompts", "--seq-len", "48", "--json"}).out)
        .at("loss")
        .get<double>();
  }
  void prepare() {
    run({"import", "model", "imported"});
    EXPECT_THAT(run({"data", "build", "--input", "prompts.jsonl", "--tokenizer", "model", "--out", "prompts"}).out,
                HasSubstr("of them targets"));
  }
  void tune() {
    prepare();
    run({"train", "tune.toml"});
    run({"export", "tuned", "out", "--dtype", "bf16", "--files", "model"});
  }
  TestDir dir_;
};

TEST_F(FineTune, LearnsTheCompletionsAndLeavesFrozenPartsAlone) {
  tune();
  EXPECT_LT(eval_loss("out"), 0.6 * eval_loss("model"));
  for (const char* frozen : {"model.embed_tokens.weight", "model.layers.0.mlp.gate.weight"})
    EXPECT_EQ(tensor("out", frozen), tensor("model", frozen)) << frozen;
  for (const char* trained : {"lm_head.weight", "model.layers.1.mlp.experts.2.up_proj.weight"})
    EXPECT_NE(tensor("out", trained), tensor("model", trained)) << trained;
  EXPECT_EQ(read_file(dir_.path("out/tokenizer.json")), read_file(dir_.path("tokenizer/tokenizer.json")));
  EXPECT_EQ(HfFolder::open(dir_.path("out")).names(), HfFolder::open(dir_.path("model")).names());
}

TEST_F(FineTune, ResumesBitForBit) {
  prepare();
  const std::vector<std::string> train{"train", "tune.toml", "--set", "optimizer.schedule=constant", "--set"};
  const auto train_to = [&](const char* steps) {
    std::vector<std::string> words = train;
    words.push_back(std::string("train.steps=") + steps);
    run(words);
  };
  train_to("4");
  train_to("9");
  run({"export", "tuned", "parts"});
  fs::remove_all(dir_.path("tuned"));
  train_to("9");
  run({"export", "tuned", "whole"});
  for (const std::string& name : HfFolder::open(dir_.path("whole")).names())
    EXPECT_EQ(tensor("parts", name), tensor("whole", name)) << name;
}

// Python with torch and transformers: MOEBIUS_PYTHON in the environment or at configuration, else python3.
std::string python() {
  const char* named = std::getenv("MOEBIUS_PYTHON");
  const std::string program = named ? named : MOEBIUS_PYTHON;
  const bool has_modules =
      !program.empty() &&
      std::system((quoted(program) + " -c 'import torch, transformers, safetensors' > /dev/null 2>&1").c_str()) == 0;
  return has_modules ? program : "";
}

class Transformers : public FineTune {
 protected:
  void SetUp() override {
    if (python().empty())
      GTEST_SKIP() << "wants Python with torch, transformers and safetensors; set MOEBIUS_PYTHON to one that has them";
    FineTune::SetUp();
  }
  void expect_loads(const std::string& folder) {
    std::vector<int32_t> tokens(2 * 21);
    for (size_t i = 0; i < tokens.size(); ++i) tokens[i] = static_cast<int32_t>(i * i % 500);
    write_safetensors(dir_.path("tokens"), {{{"tokens", DType::i32, {2, 21}}, tokens.data()}});
    run({"forward", folder, "--tokens", "tokens", "--out", "logits", "--dtype", "f32"});
    const std::string command = quoted(python()) + " " +
                                quoted(MOEBIUS_SOURCE_DIR "/tests/cli/load_in_transformers.py") + " " +
                                quoted(dir_.path(folder)) + " " + quoted(dir_.path("tokens")) + " " +
                                quoted(dir_.path("logits")) + " > " + quoted(dir_.path("said")) + " 2>&1";
    EXPECT_EQ(std::system(command.c_str()), 0) << read_file(dir_.path("said"));
    EXPECT_THAT(read_file(dir_.path("said")), HasSubstr("missing and unexpected keys: none"));
  }
};

TEST_F(Transformers, LoadsWhatWasFineTuned) {
  tune();
  expect_loads("out");
}

}  // namespace
}  // namespace moebius
