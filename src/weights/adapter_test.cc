#include "weights/adapter.h"

#include <nlohmann/json.hpp>

#include "engine/engine.h"
#include "hub/peft.h"
#include "io/files.h"
#include "io/safetensors.h"
#include "io/testing.h"
#include "weights/load.h"

namespace moebius {
namespace {

const std::string kModel = MOEBIUS_SOURCE_DIR "/tests/golden/data/qwen3_moe_v5";

// An adapter that PEFT 0.21 with transformers 5 trained with target_modules of gate_proj and up_proj:
// gate_up_proj of layer 1 has twice the rank, and no zeros.
class TrainedGateUp : public testing::Test {
 protected:
  static constexpr int64_t kRank = 2, kWide = 2 * kRank;

  TrainedGateUp() {
    for (int64_t i = 0; i < std::ssize(a_); ++i) a_[i] = static_cast<float>(i % 7 - 3) / 8;
    for (int64_t i = 0; i < std::ssize(b_); ++i) b_[i] = static_cast<float>(i % 5 + 1) / 8;
    const std::string experts = "base_model.model.model.layers.1.mlp.experts.lora_";
    write_safetensors(dir_.path(kPeftWeights), {{{experts + "A.weight", DType::f32, {E_ * kWide, H_}}, a_.data()},
                                                {{experts + "B.weight", DType::f32, {2 * I_, kWide * E_}}, b_.data()}});
    write_config({{".*\\.gate_up_proj", kWide}}, {{".*\\.gate_up_proj", 4 * kRank}});
  }
  void write_config(const nlohmann::json& ranks, const nlohmann::json& alphas) {
    const nlohmann::json config = {{"peft_type", "LORA"},      {"r", kRank},
                                   {"lora_alpha", 2 * kRank},  {"target_parameters", {"gate_up_proj"}},
                                   {"rank_pattern", ranks},    {"alpha_pattern", alphas},
                                   {"peft_version", "0.21.0"}, {"target_modules", nlohmann::json::array()}};
    write_file_atomic(dir_.path(kPeftConfig), config.dump());
  }
  // Returns element (row, column) of B A of an expert, exact in f32. PEFT views A as [experts, rank, in] and B as
  // [out, rank, experts].
  float delta(int64_t e, int64_t row, int64_t column) const {
    float sum = 0;
    for (int64_t j = 0; j < kWide; ++j) sum += b_[row * kWide * E_ + j * E_ + e] * a_[(e * kWide + j) * H_ + column];
    return sum;
  }
  std::unique_ptr<WeightsReader> merged() { return open_merged(find_weights(kModel), {.path = dir_.path()}, catalog_); }

  TestDir dir_;
  ModelSpec model_ = read_model_spec(kModel);
  ModelCatalog catalog_{model_};
  const int64_t E_ = model_.num_experts, H_ = model_.hidden_size, I_ = model_.moe_intermediate_size;
  std::vector<float> a_ = std::vector<float>(static_cast<size_t>(E_ * kWide * H_));
  std::vector<float> b_ = std::vector<float>(static_cast<size_t>(2 * I_ * kWide * E_));
};

std::vector<float> values(const WeightsReader& reader, const std::string& name) {
  for (size_t i = 0; i < reader.entries().size(); ++i) {
    if (reader.entries()[i].name != name) continue;
    EXPECT_EQ(reader.entries()[i].dtype, DType::f32);
    std::vector<float> all(static_cast<size_t>(reader.entries()[i].shape.numel()));
    reader.read(i, all.data());
    return all;
  }
  ADD_FAILURE() << "no " << name;
  return {};
}

TEST_F(TrainedGateUp, IsMerged) {
  const auto base = open_weights(find_weights(kModel), catalog_), with = merged();
  for (const char* projection : {"gate", "up"}) {
    for (int64_t e = 0; e < E_; ++e) {
      const std::string name = fmt::format("model.layers.1.mlp.experts.{}.{}_proj.weight", e, projection);
      const std::vector<float> before = values(*base, name), after = values(*with, name);
      for (int64_t o = 0; o < I_; ++o) {
        const int64_t row = projection == std::string("up") ? I_ + o : o;
        for (int64_t i = 0; i < H_; ++i) {
          ASSERT_EQ(after[o * H_ + i], before[o * H_ + i] + 2 * delta(e, row, i)) << name << " " << o << " " << i;
        }
      }
    }
  }
  const std::string down = "model.layers.1.mlp.experts.0.down_proj.weight";
  EXPECT_EQ(values(*with, down), values(*base, down));
}

TEST_F(TrainedGateUp, CannotBeTheStartOfTraining) {
  const LoraSpec lora{.rank = kRank, .alpha = 2 * kRank, .targets = {"mlp.experts.gate_up_proj"}};
  Engine engine({.model = model_, .use = ModelUse::training, .shape = {.batch = 1, .seq = 2}, .lora = lora});
  Stream s = engine.stream();
  expect_error(ErrorKind::input,
               "expected rank 2 for model.layers.1.mlp.experts.0.gate_proj.lora_B.weight; got 4, since PEFT trained "
               "gate and up of experts with one A of twice the rank",
               [&] { load_adapter(s, engine.model(), lora, dir_.path()); });
}

TEST_F(TrainedGateUp, IsRefusedWithoutItsRankPattern) {
  write_config(nullptr, nullptr);
  expect_error(ErrorKind::input, "expected rank 2 for base_model.model.model.layers.1.mlp.experts.lora_B.weight",
               [&] { merged(); });
}

}  // namespace
}  // namespace moebius
