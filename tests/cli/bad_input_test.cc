// Damaged and hostile files given to the program. Each one ends it with exit code 3 and a message
// that names the file.
// The details that a parser refuses are tested with the parser. Here is one file of each kind,
// and errors that only commands can have.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>

#include "data/token_data.h"
#include "io/json_text.h"
#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

const std::string kGolden = MOEBIUS_SOURCE_DIR "/tests/golden/data";

template <class T>
std::string raw(T value) {
  return std::string(reinterpret_cast<const char*>(&value), sizeof value);
}

constexpr const char* kRecipe = R"([run]
dir = "run"
[model]
hf = "mixtral_v4"
init_from = "mixtral_v4"
[data]
train = ["set"]
[train]
steps = 1
global_batch = 1
micro_batch = 1
seq_len = 8
[optimizer]
lr = 1e-3
)";

class BadInput : public ::testing::Test {
 protected:
  void SetUp() override {
    for (const char* model : {"mixtral_v4", "llama_v4"}) fs::copy(kGolden + "/" + model, dir_.path(model));
    fs::copy(kGolden + "/tokenizers/gpt2", dir_.path("tokenizer"));
    write_file_atomic(dir_.path("recipe.toml"), kRecipe);
    write_file_atomic(dir_.path("text.txt"), "In the beginning God created the heaven and the earth.");
    std::vector<int32_t> ids(60);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i);
    TokenDatasetWriter writer(dir_.path("set"), TokenType::u16);
    writer.add_tokens(ids);
    writer.end_document();
    writer.close();
  }
  void patch_json(const std::string& name, const std::function<void(json&)>& patch) {
    json value = read_json(dir_.path(name));
    patch(value);
    write_file_atomic(dir_.path(name), value.dump());
  }
  void patch_file(const std::string& name, const std::function<void(std::string&)>& patch) {
    std::string bytes = read_file(dir_.path(name));
    patch(bytes);
    write_file_atomic(dir_.path(name), bytes);
  }
  // Changes the tensors of the golden model.
  void patch_tensors(const std::function<void(std::vector<SafetensorsTensor>&)>& patch) {
    const std::string path = dir_.path("mixtral_v4/model.safetensors");
    const SafetensorsFile file = SafetensorsFile::open(path);
    std::vector<std::vector<char>> bytes;
    std::vector<SafetensorsTensor> tensors;
    for (const SafetensorsEntry& e : file.entries()) {
      file.read(e, bytes.emplace_back(e.bytes + 64).data());
      tensors.push_back({{e.name, e.dtype, e.shape}, bytes.back().data()});
    }
    patch(tensors);
    write_safetensors(path, tensors);
  }
  void refused(const std::vector<std::string>& words, const std::string& text, const std::string& input = "") {
    expect_refused(run_moebius(dir_, words, input), 3, text);
  }
  void import_refused(const std::string& text) {
    refused({"import", "mixtral_v4", "out"}, text);
    EXPECT_FALSE(fs::exists(dir_.path("out")));
  }
  void eval_refused(const std::string& text) {
    refused({"eval", "mixtral_v4", "--data", "set", "--seq-len", "8"}, text);
  }
  TestDir dir_;
};

// -- configs ---------------------------------------------------------------------------------------------

TEST_F(BadInput, InvalidModelConfigs) {
  const std::string path = "mixtral_v4/config.json", good = read_file(dir_.path(path));
  const auto refuse = [&](const json& patch, const std::string& text) {
    write_file_atomic(dir_.path(path), good);
    patch_json(path, [&](json& config) { config.merge_patch(patch); });
    import_refused(text);
  };
  refuse({{"num_experts_per_tok", 99}}, "mixtral_v4/config.json: model: num_experts_per_tok must be from 1 to");
  refuse({{"num_experts_per_tok", 0}}, "num_experts_per_tok must be from 1 to");
  refuse({{"num_key_value_heads", 3}}, "num_attention_heads must be divisible by num_key_value_heads");
  refuse({{"head_dim", 5}}, "head_dim must be even");
  refuse({{"num_local_experts", 0}}, "config.json");
  refuse({{"hidden_size", int64_t{1} << 60}}, "config.json");
  refuse({{"num_hidden_layers", 1 << 30}}, "num_hidden_layers must be");
  refuse({{"vocab_size", -4}}, "vocab_size must be");
  refuse({{"hidden_size", 2.5}}, "hidden_size must be");
  refuse({{"hidden_act", "gelu"}}, "hidden_act must be \"silu\"; got \"gelu\"");
  refuse({{"model_type", "nobody"}}, "model_type must be");
  refuse({{"model_type", nullptr}}, "model_type");
}

TEST_F(BadInput, ConfigsWhoseGroupsOfExpertsDoNotDivide) {
  fs::copy(kGolden + "/deepseek_v3_v5", dir_.path("deepseek"));
  const std::string path = "deepseek/config.json", good = read_file(dir_.path(path));
  const auto refuse = [&](int experts, int n_group, int topk_group, const std::string& text) {
    write_file_atomic(dir_.path(path), good);
    patch_json(path, [&](json& config) {
      config.update({{"n_routed_experts", experts}, {"n_group", n_group}, {"topk_group", topk_group}});
    });
    refused({"import", "deepseek", "out"}, text);
  };
  refuse(7, 2, 1, "num_experts must be divisible by n_group; got 7 and 2");
  refuse(8, 2, 3, "topk_group");
  refuse(8, 4, 1, "num_experts_per_tok");  // 3 of the 2 experts in one group
}

TEST_F(BadInput, ConfigsThatAreNotJson) {
  const auto refuse = [&](const std::string& contents, const std::string& text) {
    write_file_atomic(dir_.path("mixtral_v4/config.json"), contents);
    import_refused(text);
  };
  refuse("", "config.json: expected JSON");
  refuse("[1]", "config.json: expected a JSON object; got [1]");
  refuse("{\"a\": 1, \"a\": 2}", "expected JSON with distinct keys; got \"a\" twice");
  refuse("{\"a\": \"\xff\"}", "config.json: expected JSON");
  refuse(std::string(1'000'000, '['), "expected JSON nested at most 100 deep");
  refuse("{\"lr\": NaN}", "config.json: expected JSON");
}

// -- weights ---------------------------------------------------------------------------------------------

TEST_F(BadInput, SafetensorsFiles) {
  const std::string path = "mixtral_v4/model.safetensors", good = read_file(dir_.path(path));
  const auto refuse = [&](const std::string& bytes, const std::string& text) {
    write_file_atomic(dir_.path(path), bytes);
    import_refused(text);
  };
  refuse(good.substr(0, good.size() - 1), "truncated");
  refuse(good + "x", "followed by other bytes");
  refuse(good.substr(0, 5), "expected at least 8 bytes; got 5");
  refuse(raw(~uint64_t{0}) + good.substr(8), "got 18446744073709551615");
  refuse(raw(uint64_t{99'999'999}) + good.substr(8), "model.safetensors");
  refuse(std::string(good.size(), '\0'), "starts with '{'");
  const std::string zero = R"({"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}})";
  refuse(raw(uint64_t{zero.size()}) + zero, "less than 2^63 bytes");
}

TEST_F(BadInput, TensorsThatDoNotMatchTheModel) {
  const std::string path = dir_.path("mixtral_v4/model.safetensors"), good = read_file(path);
  const auto refuse = [&](const std::function<void(std::vector<SafetensorsTensor>&)>& patch, const std::string& text) {
    write_file_atomic(path, good);
    patch_tensors(patch);
    import_refused(text);
  };
  const auto find = [](std::vector<SafetensorsTensor>& all, const std::string& name) -> SafetensorsTensor& {
    return *std::find_if(all.begin(), all.end(), [&](const auto& t) { return t.decl.name == name; });
  };
  refuse([](auto& all) { all.pop_back(); }, "got 1 problem:");
  refuse([&](auto& all) { find(all, "model.norm.weight").decl.name = "model.norm.wait"; }, "got 2 problems:");
  refuse([&](auto& all) { find(all, "model.norm.weight").decl.shape[0] -= 1; }, "\"model.norm.weight\"");
  refuse([&](auto& all) { find(all, "model.norm.weight").decl.dtype = DType::i32; }, "got i32; convert");
  refuse([](auto& all) { all.push_back({{"extra", DType::f32, {1}}, all[0].data}); }, "unexpected tensor \"extra\"");
}

// A model that diverged can be converted and inspected, but with a warning.
TEST_F(BadInput, NonFiniteWeightsGiveAWarning) {
  const SafetensorsFile file = SafetensorsFile::open(dir_.path("mixtral_v4/model.safetensors"));
  const int64_t at = file.at("model.layers.0.input_layernorm.weight").offset;
  const std::string infinity = raw(-std::numeric_limits<float>::infinity());
  patch_file("mixtral_v4/model.safetensors", [&](std::string& bytes) { bytes.replace(at + 4, 4, infinity); });
  const std::string expected =
      "expected finite numbers; got 1 that are NaN or infinite in 1 tensor (model.layers.0.input_layernorm.weight)";
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"import", "mixtral_v4", "out"},
        {"export", "out", "again"},
        {"forward", "out", "--tokens", "mixtral_v4/tokens.safetensors", "--out", "logits"}}) {
    const Ran ran = run_moebius(dir_, words);
    EXPECT_EQ(ran.code, 0) << words[0] << ran.err;
    EXPECT_THAT(ran.err, testing::HasSubstr(expected)) << words[0];
  }
}

TEST_F(BadInput, IndexFiles) {
  const std::string index = "mixtral_v4/model.safetensors.index.json";
  const auto refuse = [&](const json& value, const std::string& text) {
    write_file_atomic(dir_.path(index), value.dump());
    import_refused(text);
  };
  refuse({{"weight_map", {{"a", "x.safetensors"}}}},
         "expected model.safetensors or model.safetensors.index.json; got both");
  fs::rename(dir_.path("mixtral_v4/model.safetensors"), dir_.path("mixtral_v4/shard.safetensors"));
  refuse({{"weight_map", {{"a", "../x.safetensors"}}}}, "expected the name of a .safetensors file in the folder");
  refuse({{"weight_map", {{"a", "/etc/x.safetensors"}}}}, "expected the name of a .safetensors file in the folder");
  refuse({{"weight_map", {{"a", "none.safetensors"}}}}, "none.safetensors: No such file");
  refuse({{"weight_map", {{"a", "shard.safetensors"}}}}, "got 1 that are not in the file it names (a)");
  refuse({{"weight_map", json::object()}}, "expected an object \"weight_map\"");
  refuse({{"weight_map", {{"a", 7}}}}, "expected a file name for \"a\"; got 7");
  fs::copy(dir_.path("mixtral_v4/shard.safetensors"), dir_.path("mixtral_v4/again.safetensors"));
  refuse({{"weight_map", {{"lm_head.weight", "again.safetensors"}, {"model.norm.weight", "shard.safetensors"}}}},
         "expected each tensor in one file");
}

// Sizes that only config.json claims must not cause an allocation.
TEST_F(BadInput, ConfigsThatClaimHugeModels) {
  patch_json("mixtral_v4/config.json", [](json& config) { config["intermediate_size"] = 1'000'000'000; });
  const std::string differs = "expected exactly the tensors of the model; got ";
  refused({"forward", "mixtral_v4", "--tokens", "mixtral_v4/tokens.safetensors", "--out", "logits"}, differs);
  eval_refused(differs);
  import_refused(differs);
  refused({"train", "recipe.toml"}, differs);
  EXPECT_FALSE(fs::exists(dir_.path("run")));
}

// The same holds for a recipe, before a checkpoint is read into it.
TEST_F(BadInput, RecipesThatClaimHugeModels) {
  ASSERT_EQ(run_moebius(dir_, {"import", "mixtral_v4", "checkpoint"}).code, 0);
  patch_json("mixtral_v4/config.json", [](json& config) { config["intermediate_size"] = 1'000'000'000; });
  refused({"train", "recipe.toml", "--set", "model.init_from=checkpoint"},
          "expected exactly the tensors of the model; got 0 missing (), 0 unexpected () and 48 of another shape");
}

// Experts are counted before a list of their names is made.
TEST_F(BadInput, ConfigsThatClaimCountlessExperts) {
  patch_json("mixtral_v4/config.json", [](json& config) { config["num_local_experts"] = 100'000'000; });
  import_refused("at most 1048576 experts are possible in all layers; got num_experts = 100000000");
}

// gate_up_proj is [E, 2I, H] or [E, H, 2I], and here 2I = H, so that nothing shows which.
TEST_F(BadInput, FusedExpertsOfAmbiguousOrientation) {
  patch_json("mixtral_v4/config.json", [](json& config) { config["intermediate_size"] = 12; });
  const std::vector<float> zeros(8 * 24 * 24);
  const std::string fused = "model.layers.0.mlp.experts.gate_up_proj";
  patch_tensors([&](auto& all) {
    std::erase_if(all, [](const SafetensorsTensor& t) {
      return t.decl.name.find("layers.0.block_sparse_moe.e") != std::string::npos;
    });
    all.push_back({{fused, DType::f32, {8, 24, 24}}, zeros.data()});
  });
  import_refused("expected a shape that shows the orientation of \"" + fused + "\"; got [8, 24, 24]");
  EXPECT_THAT(run_moebius(dir_, {"import", "mixtral_v4", "out"}).err,
              testing::Not(testing::HasSubstr("unexpected tensor")));  // the tensor is known
}

TEST_F(BadInput, Pickles) {
  fs::rename(dir_.path("mixtral_v4/model.safetensors"), dir_.path("mixtral_v4/pytorch_model.bin"));
  import_refused("got pytorch_model.bin, a pickle, which can run code when it is loaded; convert it with");
}

// -- token datasets --------------------------------------------------------------------------------------

TEST_F(BadInput, TokenIndexes) {
  const std::string good = read_file(dir_.path("set.idx"));
  const auto refuse = [&](size_t at, const std::string& bytes, const std::string& text) {
    std::string idx = good;
    idx.replace(at, bytes.size(), bytes);
    write_file_atomic(dir_.path("set.idx"), idx);
    eval_refused(text);
    refused({"data", "info", "set"}, text);
  };
  refuse(0, "X", "expected a Megatron index that starts with MMIDIDX");
  refuse(9, raw(uint64_t{2}), "expected version 1; got 2");
  refuse(17, "\x07", "expected an integer dtype code, 1 to 5 or 8; got 7");
  refuse(18, raw(~uint64_t{0}), "expected 34 + 12 n_seq + 8 n_doc bytes");
  refuse(26, raw(uint64_t{1} << 61), "expected 34 + 12 n_seq + 8 n_doc bytes");
  refuse(34, raw(int32_t{-1}), "expected a length >= 0; got -1");
  refuse(34, raw(int32_t{61}), "expected a .bin of 122 bytes");
  refuse(38, raw(int64_t{1} << 40), "expected sequence 0 to begin at byte 0");
  refuse(46, raw(int64_t{1}), "expected document indices that rise from 0 to 1");
  const std::string none = good.substr(0, 18) + raw(uint64_t{0}) + raw(uint64_t{1}) + raw(int64_t{0});
  write_file_atomic(dir_.path("set.idx"), none);  // without documents
  eval_refused("set");
  write_file_atomic(dir_.path("set.idx"), good.substr(0, good.size() - 1));
  eval_refused("it is truncated, damaged or multimodal");
  write_file_atomic(dir_.path("set.idx"), "");
  eval_refused("expected a Megatron index");
}

TEST_F(BadInput, Tokens) {
  patch_file("set.bin", [](std::string& bytes) { bytes.pop_back(); });
  eval_refused("expected a .bin of 120 bytes, 60 tokens of 2; got 119 bytes");
  patch_file("set.bin", [](std::string& bytes) { bytes[7] = '\xff', bytes += '\0'; });
  eval_refused("expected ids in [0, 97), the model's vocabulary; got");
  fs::remove(dir_.path("set.bin"));
  eval_refused("set.bin is not there");
}

TEST_F(BadInput, TargetSpans) {
  write_file_atomic(dir_.path("set.targets"), target_spans_text({{0, 61}}, 60));
  eval_refused("set.targets: expected spans that rise within 60 tokens; got [0, 61) as span 0");
  write_file_atomic(dir_.path("set.targets"), "x");
  eval_refused("set.targets: expected target spans of version 1");
}

TEST_F(BadInput, Sidecars) {
  write_file_atomic(dir_.path("set.json"), "{\"tokenizer\": 7}");
  refused({"data", "info", "set"}, "set.json: expected the fields of a dataset's sidecar");
}

// -- texts and tokenizers --------------------------------------------------------------------------------

TEST_F(BadInput, Tokenizers) {
  const std::string path = "tokenizer/tokenizer.json", good = read_file(dir_.path(path));
  const auto refuse = [&](const std::function<void(json&)>& patch, const std::string& text) {
    write_file_atomic(dir_.path(path), good);
    patch_json(path, patch);
    refused({"tokenize", "--tokenizer", "tokenizer"}, text, "In the beginning\n");
  };
  refuse([](json& t) { t["model"]["type"] = "Unigram"; }, "model.type: expected BPE; got \"Unigram\"");
  refuse(
      [](json& t) {
        t["model"]["merges"].push_back(json::array({"a", "zz"}));
      },
      "expected tokens of the vocabulary");
  refuse([](json& t) { t["model"]["vocab"]["zzzz"] = int64_t{1} << 31; }, "expected an integer in [0, 16777215]");
  refuse([](json& t) { t["model"]["vocab"]["zzzz"] = 5; }, "expected a unique id for each token; got 5");
  refuse([](json& t) { t["pre_tokenizer"] = {{"type", "Nobody"}}; }, "this pre-tokenizer is not supported");
  refuse(
      [](json& t) {
        t["pre_tokenizer"] = {{"type", "Split"}, {"pattern", {{"Regex", "(a"}}}, {"behavior", "Isolated"}};
      },
      "pre_tokenizer.pattern.Regex: expected a regular expression; got \"(a\"");
  refuse([](json& t) { t["normalizer"] = {{"type", "Precompiled"}}; }, "this normalizer is not supported");
  refuse([](json& t) { t.erase("model"); }, "expected the key \"model\"; got none");
  write_file_atomic(dir_.path(path), "{\"a\": \"\xff\"}");
  refused({"tokenize", "--tokenizer", "tokenizer"}, "tokenizer.json: expected JSON", "x\n");
}

TEST_F(BadInput, PatternsThatBacktrack) {
  patch_json("tokenizer/tokenizer.json", [](json& t) {
    t["pre_tokenizer"] = {
        {"type", "Sequence"},
        {"pretokenizers",
         {{{"type", "Split"}, {"pattern", {{"Regex", "(a+)+(b|d)"}}}, {"behavior", "Isolated"}, {"invert", false}},
          {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}}}};
  });
  refused({"tokenize", "--tokenizer", "tokenizer"}, "to match in bounded time", std::string(60, 'a') + "c\n");
}

TEST_F(BadInput, Texts) {
  const auto refuse = [&](const std::string& name, const std::string& bytes, const std::string& text) {
    write_file_atomic(dir_.path(name), bytes);
    refused({"data", "build", "--input", name, "--tokenizer", "tokenizer", "--out", "made"}, text);
    EXPECT_FALSE(fs::exists(dir_.path("made.idx")));
    EXPECT_FALSE(fs::exists(dir_.path("made.bin")));
  };
  write_file_atomic(dir_.path("tokenizer/tokenizer_config.json"), "{\"eos_token\": \"<|endoftext|>\"}");
  refuse("a.jsonl", "{\"text\": \"x\"}\n{\"text\": \"\xff\"}\n", "a.jsonl:2:11: expected UTF-8; got byte 0xff");
  refuse("a.jsonl", "{\"text\": \"\\ud800\"}\n", "a.jsonl:1: expected JSON");
  refuse("a.jsonl", "{\"messages\": [{\"role\": \"user\"}]}\n",
         "tokenizer: expected a chat_template.jinja, or chat_template in tokenizer_config.json; got neither");
  write_file_atomic(dir_.path("tokenizer/chat_template.jinja"), "\n{{ raise_exception('no ' ~ messages[0].role) }}");
  refuse(
      "a.jsonl", "{\"text\": \"x\"}\n{\"messages\": [{\"role\": \"user\"}]}\n",
      "a.jsonl:2: expected a chat that the template takes; got from tokenizer/chat_template.jinja:2: the template refuses this: no user");
  refuse("a.jsonl", "{\"prompt\": \"x\"}\n", "or with strings \"prompt\" and \"completion\"");
  refuse("a.jsonl", "{\"text\": {\"a\": 1}}\n", "a.jsonl:1: expected an object with a string \"text\"");
  refuse("a.jsonl", "\n\n", "expected some text; got none");
  refuse("a.txt.zst", "no zstd", "expected zstd data");
  refuse("a.txt", "a\xff", "a.txt: expected UTF-8 text for tokenizer \"tokenizer\"; got byte 0xff at offset 1");
}

TEST_F(BadInput, PromptsOfTheForwardCommand) {
  write_file_atomic(dir_.path("tokens"), "x");
  refused({"forward", "llama_v4", "--tokens", "tokens", "--out", "out"}, "tokens");
  const std::vector<int32_t> ids{1, 97};
  write_safetensors(dir_.path("tokens"), {{{"tokens", DType::i32, {1, 2}}, ids.data()}});
  refused({"forward", "llama_v4", "--tokens", "tokens", "--out", "out"}, "expected values in [0, 97); got 97");
}

}  // namespace
}  // namespace moebius
