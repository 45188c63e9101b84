// Upcycles dense golden models: the results of the new model, its tensors, the files that are
// copied, and the refusals.
#include "weights/upcycle.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <set>

#include "engine/engine.h"
#include "hub/hf_folder.h"
#include "infer/parity.h"
#include "io/json_text.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "weights/load.h"

namespace moebius {
namespace {

const std::string kData = MOEBIUS_SOURCE_DIR "/tests/golden/data";

template <class T>
std::vector<T> values(const HfFolder& folder, const std::string& name) {
  std::vector<T> all(folder.at(name).bytes / sizeof(T));
  folder.read(name, all.data());
  return all;
}

std::vector<float> logits_of(const std::string& model, const std::string& tokens) {
  TestDir dir;
  write_parity({.out = dir.path("out"), .model = model, .tokens = tokens});
  const SafetensorsFile file = SafetensorsFile::open(dir.path("out"));
  std::vector<float> logits(file.at("logits").bytes / sizeof(float));
  file.read(file.at("logits"), logits.data());
  return logits;
}

struct Case {
  const char *dense, *family;
};

class Upcycled : public testing::TestWithParam<Case> {
 protected:
  std::string dense() const { return kData + "/" + GetParam().dense; }
  std::string out() const { return dir_.path("moe"); }
  UpcycleResult make(int64_t experts, int64_t top_k, int64_t granularity) {
    return upcycle({.out = out(),
                    .model = dense(),
                    .num_experts = experts,
                    .top_k = top_k,
                    .granularity = granularity,
                    .seed = 3,
                    .shard_bytes = 30000});
  }
  TestDir dir_;
};

TEST_P(Upcycled, HasTheLogitsOfTheDenseModel) {
  EXPECT_EQ(make(5, 2, 1).model.family, GetParam().family);
  const std::string tokens = dense() + "/tokens.safetensors";
  const std::vector<float> want = logits_of(dense(), tokens), got = logits_of(out(), tokens);
  ASSERT_EQ(got.size(), want.size());
  float largest = 0;
  for (const float x : want) largest = std::max(largest, std::abs(x));
  // Two equal addends, whose weights sum to 1, are each rounded. That is some eps of the largest
  // term, through two layers.
  for (size_t i = 0; i < want.size(); ++i) ASSERT_NEAR(got[i], want[i], 2e-5 * largest) << i;
}

TEST_P(Upcycled, ChosenExpertsDiffer) {
  make(5, 2, 1);
  TestDir dir;
  write_parity({.out = dir.path("out"), .model = out(), .tokens = dense() + "/tokens.safetensors"});
  const SafetensorsFile file = SafetensorsFile::open(dir.path("out"));
  std::vector<int32_t> topk(file.at("router.0.topk").bytes / sizeof(int32_t));
  file.read(file.at("router.0.topk"), topk.data());
  EXPECT_EQ(std::set<int32_t>(topk.begin(), topk.end()).size(), 5u) << "the router's rows are random";
}

TEST_P(Upcycled, TrainingReducesTheLoss) {
  const ModelSpec model = make(4, 2, 2).model;
  OptimizerSpec optimizer;
  optimizer.lr = 3e-3;
  Engine engine({.model = model,
                 .balance = {.aux = true, .aux_coeff = 0.01},
                 .use = ModelUse::training,
                 .shape = {.batch = 2, .seq = 9, .max_segments = 2},
                 .optimizer = optimizer});
  Stream s = engine.stream();
  load_weights(s, engine.model(), out());
  MicroBatch& batch = engine.batch();
  for (int64_t t = 0; t < 18; ++t) {
    batch.token_T.ptr<int32_t>()[t] = static_cast<int32_t>(t * t % 31);
    batch.target_T.ptr<int32_t>()[t] = static_cast<int32_t>((t + 1) * (t + 1) % 31);
    batch.weight_T.ptr<float>()[t] = 1.0f;
    batch.pos_T.ptr<int32_t>()[t] = static_cast<int32_t>(t % 9);
    batch.doc_start_T.ptr<int32_t>()[t] = 0;
    batch.segment_T.ptr<int32_t>()[t] = static_cast<int32_t>(t / 9);
  }
  batch.scalars.set_loss_scale(0, 1.0 / 18);
  batch.scalars.total_tokens = 18;
  batch.training = true;
  std::vector<double> losses;
  for (int64_t step = 1; step <= 8; ++step) {
    engine.step(step, optimizer.lr);
    losses.push_back(engine.loss());
    engine.end_of_step();
  }
  EXPECT_LT(losses.back(), 0.9 * losses.front());
}

INSTANTIATE_TEST_SUITE_P(Families, Upcycled,
                         testing::Values(Case{"llama_v4", "mixtral"}, Case{"mistral_v5_window", "mixtral"},
                                         Case{"qwen2_v4", "qwen2_moe"}, Case{"qwen3_v4_packed", "qwen3_moe"},
                                         Case{"qwen3_v5_bias", "qwen3_moe"}),
                         [](const auto& info) { return std::string(info.param.dense); });

// Expert j of E = 4, G = 2 is slice j mod 2 of the MLP, times 2^(1/3). Its router row is j / 2.
TEST(Upcycle, ExpertsAreScaledSlicesOfTheMlp) {
  TestDir dir;
  const std::string out = dir.path("moe"), dense = kData + "/qwen3_v4_packed";
  upcycle({.out = out, .model = dense, .num_experts = 4, .top_k = 2, .granularity = 2});
  const HfFolder from = HfFolder::open(dense), to = HfFolder::open(out);
  const std::string mlp = "model.layers.1.mlp.";
  const auto gate = values<float>(from, mlp + "gate_proj.weight"), down = values<float>(from, mlp + "down_proj.weight");
  const int64_t F = from.at(mlp + "gate_proj.weight").shape[0], D = from.at(mlp + "gate_proj.weight").shape[1];
  const float scale = std::cbrt(2.0f);
  for (int64_t e = 0; e < 4; ++e) {
    const std::string expert = fmt::format("{}experts.{}.", mlp, e);
    const auto e_gate = values<float>(to, expert + "gate_proj.weight");
    const auto e_down = values<float>(to, expert + "down_proj.weight");
    ASSERT_EQ(to.at(expert + "up_proj.weight").shape, (std::vector<int64_t>{F / 2, D}));
    ASSERT_EQ(to.at(expert + "down_proj.weight").shape, (std::vector<int64_t>{D, F / 2}));
    for (int64_t f = 0; f < F / 2; ++f) {
      for (int64_t d = 0; d < D; ++d) {
        ASSERT_EQ(e_gate[f * D + d], scale * gate[(e % 2 * (F / 2) + f) * D + d]) << e;
        ASSERT_EQ(e_down[d * (F / 2) + f], scale * down[d * F + e % 2 * (F / 2) + f]) << e;
      }
    }
  }
  const auto router = values<float>(to, mlp + "gate.weight");
  const std::vector<float> row0(router.begin(), router.begin() + D), row1(router.begin() + D, router.begin() + 2 * D),
      row2(router.begin() + 2 * D, router.begin() + 3 * D);
  EXPECT_EQ(row0, row1);
  EXPECT_NE(row0, row2);
}

// Unknown keys and other files are copied. Keys of the dense class are not.
TEST(Upcycle, CopiesConfigKeysAndOtherFiles) {
  TestDir dir;
  const std::string dense = dir.path("dense"), out = dir.path("moe");
  std::filesystem::copy(kData + "/llama_v4", dense);
  nlohmann::json config = read_json(dense + "/config.json");
  config["my_key"] = 7;
  config["auto_map"] = {{"AutoModel", "x.Y"}};
  write_file_atomic(dense + "/config.json", config.dump());
  write_file_atomic(dense + "/tokenizer.json", "{}");
  const UpcycleResult result =
      upcycle({.out = out, .model = dense, .num_experts = 4, .top_k = 2, .shard_bytes = 20000});
  EXPECT_GT(result.folder.num_shards, 1);
  EXPECT_EQ(read_file(out + "/tokenizer.json"), "{}");
  const nlohmann::json made = read_json(out + "/config.json");
  EXPECT_EQ(made.at("my_key"), 7);
  EXPECT_EQ(made.at("model_type"), "mixtral");
  EXPECT_EQ(made.at("architectures"), nlohmann::json({"MixtralForCausalLM"}));
  EXPECT_EQ(made.at("num_local_experts"), 4);
  EXPECT_EQ(made.at("eos_token_id"), 2);
  for (const char* gone : {"auto_map", "mlp_bias", "attention_bias"}) EXPECT_FALSE(made.contains(gone)) << gone;
}

TEST(Upcycle, RefusesInvalidSettings) {
  TestDir dir;
  const auto refused = [&](ErrorKind kind, const std::string& text, UpcycleSpec spec) {
    spec.out = dir.path("moe");
    if (spec.model.empty()) spec.model = kData + "/llama_v4";
    expect_error(kind, text, [&] { upcycle(spec); });
    EXPECT_EQ(dir.num_files(), 0);
  };
  refused(ErrorKind::input, "expected a dense model; got mixtral with",
          {.model = kData + "/mixtral_v4", .num_experts = 4, .top_k = 2});
  refused(ErrorKind::usage, "a granularity that divides intermediate_size = 28; got 3",
          {.num_experts = 6, .top_k = 2, .granularity = 3});
  refused(ErrorKind::usage, "a multiple of granularity = 2; got 5", {.num_experts = 5, .top_k = 2, .granularity = 2});
  refused(ErrorKind::usage, "expected top-k in [1, 4], the experts; got 5", {.num_experts = 4, .top_k = 5});
  refused(ErrorKind::usage, "top-k in [1, 4], the experts; got 0", {.num_experts = 4});
  refused(ErrorKind::usage, "granularity that divides intermediate_size = 28; got 0",
          {.num_experts = 4, .top_k = 2, .granularity = 0});
}

// A setting for which the family of experts has no key is an error of the folder, and the user can
// change the folder.
TEST(Upcycle, RefusesSettingsWithoutAKeyInTheFamily) {
  TestDir dir;
  const auto refused = [&](const std::string& text, const std::string& model) {
    expect_error(ErrorKind::input, text,
                 [&] { upcycle({.out = dir.path("moe"), .model = model, .num_experts = 4, .top_k = 2}); });
    EXPECT_FALSE(std::filesystem::exists(dir.path("moe")));
  };
  refused("upcycle: expected a llama without biases in attention, as mixtral is; got attention_bias = true",
          kData + "/llama_v4_bias");
  const std::string mixed = dir.path("mixed");
  std::filesystem::copy(kData + "/qwen3_v4_packed", mixed);
  nlohmann::json config = read_json(mixed + "/config.json");
  config.update(
      {{"use_sliding_window", true}, {"sliding_window", 5}, {"layer_types", {"full_attention", "sliding_attention"}}});
  write_file_atomic(mixed + "/config.json", config.dump());
  refused(
      "upcycle: expected a qwen3 whose layers all have the sliding window or all have none, as those of qwen3_moe do; "
      "got 1 of 2 layers with a window of 5; for sequences of at most 5 tokens the window makes no difference, set "
      "use_sliding_window to false in config.json",
      mixed);
}

}  // namespace
}  // namespace moebius
