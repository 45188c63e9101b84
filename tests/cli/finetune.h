// The commands and the recipe of docs/guide/fine-tune.md on a small model: data, training with
// frozen parts, export.
#pragma once

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <sstream>
#include <stdexcept>

#include "hub/hf_folder.h"
#include "tests/cli/program.h"

namespace moebius {

inline const std::string kGolden = MOEBIUS_SOURCE_DIR "/tests/golden/data";
inline const std::string kModelFolder = "Qwen3-30B-A3B";  // the name in the guide; here it is a small model

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

inline const std::string kGuide = "docs/guide/fine-tune.md", kGuideSection = "\n## The commands and the recipe\n";

// The texts that a reader of the guide copies: its commands, and the recipe that they train.
struct GuideText {
  std::vector<std::string> commands;
  std::string recipe;
};

// Returns the fenced block that begins at the first `fence` in a section of the guide.
inline std::string block_of(const std::string& section, const std::string& fence) {
  const size_t begin = section.find("\n" + fence + "\n"), text = begin + fence.size() + 2;
  const size_t end = section.find("\n```\n", text);
  if (begin == section.npos || end == section.npos) throw std::runtime_error(kGuide + " has no block " + fence);
  return section.substr(text, end + 1 - text);
}

inline std::string guide_section(const std::string& heading) {
  const std::string text = read_file(MOEBIUS_SOURCE_DIR "/" + kGuide);
  const size_t begin = text.find(heading);
  if (begin == text.npos) throw std::runtime_error(kGuide + " has no heading" + heading);
  return text.substr(begin, text.find("\n## ", begin + 1) - begin);
}

inline GuideText read_guide() {
  const std::string section = guide_section(kGuideSection);
  GuideText guide{.recipe = block_of(section, "```toml")};
  std::istringstream lines(block_of(section, "```"));
  for (std::string line; std::getline(lines, line);) guide.commands.push_back(line.substr(0, line.find(" #")));
  return guide;
}

// Overrides that make the run small enough for a test.
inline const std::vector<std::string> kSmall{"run.device=cpu",           "train.steps=30",
                                             "train.global_batch=4",     "train.micro_batch=2",
                                             "train.seq_len=48",         "optimizer.lr=5e-3",
                                             "optimizer.warmup_steps=0", "moe.balance=\"aux\"",
                                             "moe.aux_coeff=1e-3",       "data.valid=[\"runs/tuned/data/pairs\"]"};

class FineTune : public testing::Test {
 protected:
  // Makes a model's folder as another program may have written it: bf16, with a tokenizer.
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
    write_file_atomic(dir_.path("tune.toml"), guide_.recipe);
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
    return nlohmann::json::parse(
               run({"eval", model, "--data", "runs/tuned/data/pairs", "--seq-len", "48", "--json"}).out)
        .at("loss")
        .get<double>();
  }
  // Runs the first command of the guide that begins with `command`.
  Ran run_guide(const std::string& command, std::vector<std::string> more = {}) {
    const std::string start = "build/moebius " + command + " ";
    const auto it = std::find_if(guide_.commands.begin(), guide_.commands.end(),
                                 [&](const std::string& line) { return line.starts_with(start); });
    if (it == guide_.commands.end()) return ADD_FAILURE() << kGuide << " has no line " << start, Ran{};
    std::istringstream line(it->substr(std::strlen("build/moebius ")));
    std::vector<std::string> words{std::istream_iterator<std::string>(line), {}};
    for (const std::string& set : command == "train" ? kSmall : std::vector<std::string>{})
      words.insert(words.end(), {"--set", set});
    words.insert(words.end(), more.begin(), more.end());
    return run(words);
  }
  void prepare() { EXPECT_THAT(run_guide("data build").out, testing::HasSubstr("of them targets")); }
  void tune() {
    prepare();
    run_guide("train");
    run_guide("export");
  }
  const GuideText guide_ = read_guide();
  TestDir dir_;
};

}  // namespace moebius
