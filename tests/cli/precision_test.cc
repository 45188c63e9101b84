// Runs with quantised products, as a user meets them: resume, weights and rows in 8 bits, their figures, and exports.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <sstream>

#include "io/safetensors.h"
#include "tests/cli/program.h"

namespace moebius {
namespace {

constexpr const char* kRecipe = R"([model]
model_type = "qwen3_moe"
vocab_size = 257
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 1
head_dim = 16
intermediate_size = 48
max_position_embeddings = 32
num_experts = 4
num_experts_per_tok = 2
moe_intermediate_size = 16
[data]
train = ["text"]
tokenizer = "bytes"
[train]
steps = 4
global_batch = 4
micro_batch = 2
seq_len = 16
[optimizer]
lr = 1e-2
schedule = "constant"
[run]
threads = 1
)";

class PrecisionRuns : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string text;
    for (int i = 0; i < 40; ++i) text += fmt::format("the light of day {} and the night {}\n", i * 7 % 11, i * 5 % 13);
    write_file_atomic(dir_.path("text.txt"), text);
    write_file_atomic(dir_.path("run.toml"), kRecipe);
    ASSERT_EQ(run_moebius(dir_, {"data", "build", "--input", "text.txt", "--tokenizer", "bytes", "--out", "text"}).code,
              0);
  }
  void train(const std::string& to, const std::vector<std::string>& set) {
    std::vector<std::string> words{"--quiet", "train", "run.toml", "--set", "run.dir=" + to};
    for (const std::string& each : set) words.insert(words.end(), {"--set", each});
    const Ran ran = run_moebius(dir_, words);
    ASSERT_EQ(ran.code, 0) << ran.err;
  }
  std::vector<nlohmann::json> steps(const std::string& run) const {
    std::istringstream lines(read_file(dir_.path(run + "/metrics.jsonl")));
    std::vector<nlohmann::json> all;
    for (std::string line; std::getline(lines, line);)
      if (nlohmann::json record = nlohmann::json::parse(line); record.at("kind") == "train") all.push_back(record);
    return all;
  }
  std::vector<double> losses(const std::string& run) const {
    std::vector<double> all;
    for (const nlohmann::json& step : steps(run)) all.push_back(step.at("loss"));
    return all;
  }
  // Masters and moments after the last step: all that a checkpoint holds.
  std::map<std::string, std::vector<char>> state(const std::string& run) const {
    std::map<std::string, std::vector<char>> all;
    for (const auto& file : std::filesystem::directory_iterator(dir_.path(run + "/checkpoints/step-00000004"))) {
      if (file.path().extension() != ".safetensors") continue;
      const SafetensorsFile tensors = SafetensorsFile::open(file.path().string());
      for (const SafetensorsEntry& entry : tensors.entries()) {
        std::vector<char>& bytes = all[entry.name];
        bytes.resize(entry.bytes);
        tensors.read(entry, bytes.data());
      }
    }
    return all;
  }
  TestDir dir_;
};

TEST_P(PrecisionRuns, ResumeBitForBit) {
  const std::string recipe = "precision.recipe=" + GetParam();
  train("parts", {recipe, "train.steps=2"});
  train("parts", {recipe});
  train("whole", {recipe});
  EXPECT_EQ(losses("parts"), losses("whole"));
  EXPECT_EQ(state("parts"), state("whole"));
  EXPECT_FALSE(state("whole").empty());
}

INSTANTIATE_TEST_SUITE_P(Recipes, PrecisionRuns, ::testing::Values("fp8_block", "fp8_tensor", "mxfp8", "nvfp4"),
                         [](const auto& info) { return info.param; });

class EightBits : public PrecisionRuns {};

// A run may change how it holds weights whenever it resumes.
TEST_F(EightBits, WeightsGiveTheSameRun) {
  const std::string recipe = "precision.recipe=fp8_block", held = "precision.weights=recipe";
  train("compute", {recipe});
  train("held", {recipe, held, "log.precision=true"});
  train("changed", {recipe, held, "train.steps=2"});
  train("changed", {recipe});
  for (const char* run : {"held", "changed"}) {
    EXPECT_EQ(losses(run), losses("compute")) << run;
    EXPECT_EQ(state(run), state("compute")) << run;
  }
  const nlohmann::json figures = steps("held").back().at("precision");
  ASSERT_EQ(figures.size(), 2u) << figures;
  for (const auto& [layer, of] : figures.items()) {
    EXPECT_EQ(of.at("saturated"), 0.0) << layer;
    EXPECT_GE(of.at("zeroed"), 0.0);
    EXPECT_LT(of.at("zeroed"), 0.05);
    EXPECT_GT(of.at("scale_min"), 0.0);
    EXPECT_LT(of.at("scale_min"), of.at("scale_max"));
  }
  EXPECT_FALSE(steps("compute").back().contains("precision"));
}

// A scale of a whole tensor is a power of two that no element exceeds. Gradients of a layer, in E5M2, and weights, in
// E4M3, are in one entry.
TEST_F(EightBits, StatisticsOfWholeTensors) {
  train("run", {"precision.recipe=fp8_tensor", "log.precision=true", "train.steps=2"});
  const nlohmann::json figures = steps("run").back().at("precision");
  ASSERT_EQ(figures.size(), 2u) << figures;
  for (const auto& [layer, of] : figures.items()) {
    EXPECT_EQ(of.at("saturated"), 0.0) << layer;
    EXPECT_GE(of.at("zeroed"), 0.0);
    EXPECT_LT(of.at("zeroed"), 0.05);
    for (const char* which : {"scale_min", "scale_max"}) {
      int exponent = 0;
      EXPECT_EQ(std::frexp(of.at(which).get<double>(), &exponent), 0.5) << layer << " " << which;
    }
    EXPECT_LT(of.at("scale_min"), of.at("scale_max"));
  }
}

// Rows are rounded on one rank too, and a run does not change that when it resumes.
TEST_F(EightBits, RowsAreRounded) {
  const std::string recipe = "precision.recipe=fp8_block", sent = "precision.dispatch=recipe",
                    kept = "precision.keep=[\"*.experts.*\"]";  // products of experts would round the rows themselves
  train("compute", {recipe, kept});
  train("sent", {recipe, kept, sent, "train.steps=2"});
  train("sent", {recipe, kept, sent});
  train("whole", {recipe, kept, sent});
  EXPECT_EQ(losses("sent"), losses("whole"));
  EXPECT_EQ(state("sent"), state("whole"));
  EXPECT_NE(losses("sent"), losses("compute"));
  EXPECT_NEAR(losses("sent").back(), losses("compute").back(), 0.02 * losses("compute").back());
  EXPECT_THAT(run_moebius(dir_, {"train", "run.toml", "--set", "run.dir=sent", "--set", recipe, "--set", kept}).err,
              ::testing::HasSubstr("precision.dispatch"));
}

// A run does not change how it saves activations when it resumes, and its plan counts fewer bytes.
TEST_F(EightBits, ActivationsAreRounded) {
  const std::string recipe = "precision.recipe=fp8_block", saved = "precision.activations=recipe";
  train("compute", {recipe});
  train("saved", {recipe, saved, "train.steps=2"});
  train("saved", {recipe, saved});
  train("whole", {recipe, saved});
  EXPECT_EQ(losses("saved"), losses("whole"));
  EXPECT_EQ(state("saved"), state("whole"));
  EXPECT_EQ(losses("saved").front(), losses("compute").front());
  EXPECT_NE(losses("saved"), losses("compute"));
  EXPECT_NEAR(losses("saved").back(), losses("compute").back(), 0.02 * losses("compute").back());
  const auto saved_bytes = [&](const std::string& set, const std::string& also = "") {
    std::vector<std::string> args{"config", "run.toml", "--json", "--set", recipe, "--set", set};
    if (!also.empty()) args.insert(args.end(), {"--set", also});
    const Ran ran = run_moebius(dir_, args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return nlohmann::json::parse(ran.out).at("memory_bytes").at("saved").get<int64_t>();
  };
  // 32 tokens with 2 rows each, in 2 layers: rows of 32 elements take 48 bytes instead of 64. The outputs of both norms
  // of a layer are not kept either, unless the recipe says so.
  const int64_t plain = saved_bytes("precision.activations=compute");
  EXPECT_EQ(plain - saved_bytes(saved, "memory.recompute=[]"), 2 * 64 * 16);
  EXPECT_EQ(saved_bytes(saved), saved_bytes(saved, "memory.recompute=[\"norm\"]"));
  EXPECT_EQ(plain - saved_bytes(saved),
            saved_bytes("memory.recompute=[]") - saved_bytes("memory.recompute=[\"norm\"]") + 2 * 64 * 16);
  EXPECT_EQ(saved_bytes(saved, "memory.offload=[\"norm\"]"), saved_bytes(saved)) << "they are on the host";
}

// Checkpoints hold f32 masters and moments, so a run may go on in another format, and its end may be in bf16.
TEST_F(EightBits, RunsGoOnWithAnotherRecipe) {
  train("run", {"precision.recipe=fp8_block", "train.steps=2"});
  const auto go_on = [&](std::vector<std::string> sets) {
    std::vector<std::string> args{"train", "run.toml", "--set", "run.dir=" + dir_.path("run")};
    for (const std::string& set : sets) args.insert(args.end(), {"--set", set});
    const Ran ran = run_moebius(dir_, args);
    EXPECT_EQ(ran.code, 0) << ran.err;
    return ran.err;
  };
  EXPECT_THAT(go_on({"precision.recipe=nvfp4", "precision.keep=[\"*.o_proj.*\"]", "train.steps=3"}),
              ::testing::HasSubstr("precision.recipe was \"fp8_block\" and is \"nvfp4\", precision.keep was [] and is "
                                   "[\"*.o_proj.*\"]: operands are rounded in another way from step 3 on"));
  EXPECT_THAT(go_on({"train.steps=4"}), ::testing::HasSubstr("precision.recipe was \"nvfp4\" and is \"none\""));
}

TEST_F(EightBits, RunsAreExportedWithBlockScales) {
  train("run", {"precision.recipe=fp8_block"});
  const Ran ran = run_moebius(dir_, {"export", "run", "packed", "--dtype", "fp8_block"});
  ASSERT_EQ(ran.code, 0) << ran.err;
  const SafetensorsFile file = SafetensorsFile::open(dir_.path("packed/model.safetensors"));
  EXPECT_EQ(file.at("model.layers.0.self_attn.o_proj.weight").dtype, DType::f8_e4m3);
  EXPECT_EQ(file.at("model.layers.0.self_attn.o_proj.weight_scale_inv").shape, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(file.at("model.layers.0.input_layernorm.weight").dtype, DType::bf16);
  const nlohmann::json config = nlohmann::json::parse(read_file(dir_.path("packed/config.json")));
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  EXPECT_EQ(config.at("quantization_config").at("modules_to_not_convert"),
            (nlohmann::json{"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.k_proj",
                            "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.gate",
                            "model.layers.1.self_attn.q_proj", "model.layers.1.self_attn.k_proj",
                            "model.layers.1.self_attn.v_proj", "model.layers.1.mlp.gate", "lm_head"}));
  const std::vector<std::string> plain = config.at("quantization_config").at("modules_to_not_convert");
  int packed = 0;
  for (const SafetensorsEntry& entry :
       file.entries()) {  // every matrix has scales for its blocks, or is named as plain
    const bool is_matrix = entry.shape.size() == 2 && entry.name.ends_with(".weight");
    if (!is_matrix || entry.name == "model.embed_tokens.weight") continue;
    const std::string module = entry.name.substr(0, entry.name.rfind('.'));
    const bool is_plain = std::find(plain.begin(), plain.end(), module) != plain.end();
    EXPECT_EQ(entry.dtype, is_plain ? DType::bf16 : DType::f8_e4m3) << entry.name;
    if (is_plain) continue;
    ++packed;
    const SafetensorsEntry& scales = file.at(entry.name + "_scale_inv");
    EXPECT_EQ(scales.dtype, DType::f32) << entry.name;
    EXPECT_EQ(scales.shape, (std::vector<int64_t>{(entry.shape[0] + 127) / 128, (entry.shape[1] + 127) / 128}));
  }
  EXPECT_EQ(packed, 2 * (1 + 4 * 3));  // o and three of each expert; q and k have less than a block of rows
  EXPECT_EQ(file.at("model.layers.1.mlp.experts.3.gate_proj.weight_scale_inv").shape, (std::vector<int64_t>{1, 1}));
  const auto loss = [&](const char* model) {
    return json_of(run_moebius(dir_, {"eval", model, "--data", "text", "--seq-len", "16", "--json"}))
        .at("loss")
        .get<double>();
  };
  EXPECT_NEAR(loss("packed"), loss("run"), 0.02 * loss("run"));
}

}  // namespace
}  // namespace moebius
