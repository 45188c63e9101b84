// The README's way through fine-tuning, on a small model: data, training with parts frozen, export.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>

#include "hub/hf_folder.h"
#include "tests/cli/program.h"

namespace moebius {

inline const std::string kGolden = MOEBIUS_SOURCE_DIR "/tests/golden/data";
inline const std::string kModelFolder = "Qwen3-30B-A3B";  // as the README has it, though it is a small one here

inline constexpr const char* kModel = R"([run]
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

// What the README says of fine-tuning: its commands, and the recipe they train.
struct ReadmeText {
  std::vector<std::string> commands;
  std::string recipe;
};

// The fenced block that begins at the first `fence` after a place in the text.
inline std::string block_after(const std::string& text, const std::string& place, const std::string& fence) {
  const size_t begin = text.find(fence + "\n", text.find(place)) + fence.size() + 1;
  return text.substr(begin, text.find("```", begin) - begin);
}

inline ReadmeText read_readme() {
  const std::string text = read_file(MOEBIUS_SOURCE_DIR "/README.md"), section = "## Fine-tune a model that exists";
  ReadmeText readme{.recipe = block_after(text, section, "```toml")};
  std::istringstream lines(block_after(text, section, "```"));
  for (std::string line; std::getline(lines, line);) readme.commands.push_back(line.substr(0, line.find(" #")));
  return readme;
}

// Small enough for a test.
inline const std::vector<std::string> kSmall{"run.device=cpu",           "train.steps=30",
                                             "train.global_batch=4",     "train.micro_batch=2",
                                             "train.seq_len=48",         "optimizer.lr=5e-3",
                                             "optimizer.warmup_steps=0", "moe.balance=\"aux\"",
                                             "moe.aux_coeff=1e-3",       "data.valid=[\"data/pairs\"]"};

class FineTune : public testing::Test {
 protected:
  // A model's folder as somebody else may have written it: bf16, with a tokenizer.
  void SetUp() override {
    std::filesystem::copy(kGolden + "/tokenizers/qwen2", dir_.path("tokenizer"));
    std::filesystem::remove(dir_.path("tokenizer/expected.json"));
    write_file_atomic(dir_.path("tokenizer/tokenizer_config.json"),
                      R"({"eos_token": "<|endoftext|>", "tokenizer_class": "PreTrainedTokenizerFast"})");
    std::string text, prompts;
    for (int i = 0; i < 40; ++i) {
      text += fmt::format("the light of day {} and the night {}\n", i * 7 % 11, i * 5 % 13);
      prompts += fmt::format("{{\"prompt\": \"day {0}?\", \"completion\": \" night {1}\"}}\n", i % 9, i % 9 + 1);
    }
    write_file_atomic(dir_.path("text.txt"), text);
    write_file_atomic(dir_.path("pairs.jsonl"), prompts);
    write_file_atomic(dir_.path("base.toml"), kModel);
    write_file_atomic(dir_.path("tune.toml"), readme_.recipe);
    run({"data", "build", "--input", "text.txt", "--tokenizer", "tokenizer", "--out", "text"});
    run({"train", "base.toml"});
    run({"export", "base", kModelFolder, "--dtype", "bf16", "--files", "tokenizer"});
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
    return nlohmann::json::parse(run({"eval", model, "--data", "data/pairs", "--seq-len", "48", "--json"}).out)
        .at("loss")
        .get<double>();
  }
  // The README's commands that begin so.
  Ran run_readme(const std::string& command, std::vector<std::string> more = {}) {
    const std::string start = "build/moebius " + command + " ";
    const auto it = std::find_if(readme_.commands.begin(), readme_.commands.end(),
                                 [&](const std::string& line) { return line.starts_with(start); });
    if (it == readme_.commands.end()) return ADD_FAILURE() << "README.md has no line " << start, Ran{};
    std::istringstream line(it->substr(std::strlen("build/moebius ")));
    std::vector<std::string> words{std::istream_iterator<std::string>(line), {}};
    for (const std::string& set : command == "train" ? kSmall : std::vector<std::string>{})
      words.insert(words.end(), {"--set", set});
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
  void prepare() { EXPECT_THAT(run_readme("data build").out, testing::HasSubstr("of them targets")); }
  void tune() {
    prepare();
    run_readme("train");
    run_readme("export");
  }
  const ReadmeText readme_ = read_readme();
  TestDir dir_;
};

}  // namespace moebius
