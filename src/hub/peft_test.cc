#include "hub/peft.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <regex>

#include "core/error.h"
#include "io/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

json plain_config() { return {{"peft_type", "LORA"}, {"r", 8}, {"lora_alpha", 16}, {"lora_dropout", 0.1}}; }

std::string refusal(const json& config) {
  try {
    parse_peft_config(config.dump(), "adapter_config.json");
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), ErrorKind::input);
    return e.what();
  }
  return "";
}

std::string refusal(const std::string& key, const json& value) {
  json config = plain_config();
  config[key] = value;
  return refusal(config);
}

TEST(PeftConfig, HasRankAndAlpha) {
  const LoraSpec lora = parse_peft_config(plain_config().dump(), "adapter_config.json");
  EXPECT_EQ(lora.rank, 8);
  EXPECT_EQ(lora.scale(), 2.0f);
}

// lora_alpha / sqrt(r) instead of lora_alpha / r.
TEST(PeftConfig, ScaledByTheRootOfTheRank) {
  json config = plain_config();
  config["r"] = 16;
  config["use_rslora"] = true;
  EXPECT_EQ(parse_peft_config(config.dump(), "c").scale(), 4.0f);
  config["use_rslora"] = false;
  EXPECT_EQ(parse_peft_config(config.dump(), "c").scale(), 1.0f);
  EXPECT_THAT(refusal("use_rslora", 1), HasSubstr("use_rslora must be true or false; got 1"));
}

TEST(PeftConfig, SettingsThatComputeSomethingElseAreNamed) {
  EXPECT_EQ(refusal(plain_config()), "");
  EXPECT_EQ(refusal("modules_to_save", json::array()), "");
  EXPECT_EQ(refusal("bias", "none"), "");
  EXPECT_EQ(refusal("init_lora_weights", "gaussian"), "");
  EXPECT_EQ(refusal("init_lora_weights", false), "");
  EXPECT_EQ(refusal("target_parameters", {"mlp.experts.gate_up_proj"}), "");
  const json others = {{"use_dora", true},
                       {"bias", "all"},
                       {"fan_in_fan_out", true},
                       {"modules_to_save", {"lm_head"}},
                       {"init_lora_weights", "pissa"},
                       {"use_bdlora", {{"nblocks", 2}}},
                       {"kasa_config", json::object()},
                       {"monteclora_config", json::object()},
                       {"rank_pattern", {{"q_proj", 4}}}};
  for (const auto& [key, value] : others.items())
    EXPECT_THAT(refusal(key, value), HasSubstr("adapter_config.json: " + key + " must be "));
  EXPECT_THAT(
      refusal("peft_type", "IA3"),
      HasSubstr(
          "expected an adapter of peft_type \"LORA\"; got \"IA3\"; choose another adapter, or merge this one with PEFT"));
  EXPECT_THAT(refusal(json::array()), HasSubstr("got array"));
}

// Adapters of gate_proj and up_proj in one tensor of twice the rank.
TEST(PeftConfig, OnlyStackedAdaptersHavePatterns) {
  json stacked = plain_config();
  stacked["rank_pattern"] = {{".*\\.gate_up_proj", 16}};
  EXPECT_THAT(refusal(stacked), HasSubstr("rank_pattern must have the keys of alpha_pattern"));
  stacked["alpha_pattern"] = {{".*\\.gate_up_proj", 32}};
  EXPECT_EQ(refusal(stacked), "");
  stacked["use_rslora"] = true;
  EXPECT_THAT(refusal(stacked), HasSubstr("no use_rslora with it"));
  EXPECT_EQ(refusal("rank_pattern", json::object()), "");
  EXPECT_THAT(refusal("rank_pattern", {{"gate_up_proj", 4}}),
              HasSubstr("rank_pattern must be {}, or twice r for gate_up_proj of experts; got {\"gate_up_proj\":4}"));
  EXPECT_THAT(refusal("alpha_pattern", {{"down_proj", 32}}),
              HasSubstr("alpha_pattern must be {}, or twice lora_alpha"));
  EXPECT_THAT(refusal("alpha_pattern", 2), HasSubstr("got 2, which this version does not compute"));
}

TEST(PeftConfig, NumbersOutOfRangeAreRefused) {
  for (const json& r : {json(0), json(-1), json(1e300), json("8"), json(nullptr), json(true), json(65537)})
    EXPECT_THAT(refusal("r", r), HasSubstr("r must be a number from 1 to 65536; got " + r.dump()));
  EXPECT_THAT(refusal("r", 2.5), HasSubstr("r must be a whole number; got 2.5"));
  for (const json& alpha : {json(0), json(-2), json(1e300)})
    EXPECT_THAT(refusal("lora_alpha", alpha), HasSubstr("lora_alpha must be a number from 1e-30 to 1e+30; got "));
}

// One pattern where it matches the adapted modules alone, else their names.
TEST(PeftConfig, TargetModulesAreAPatternOnlyIfItMatchesExactly) {
  const std::vector<std::string> all{"model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj"};
  const LoraSpec lora{.rank = 4, .alpha = 8};
  const json whole = peft_config(lora, "base", {.modules = all, .all_modules = all});
  EXPECT_EQ(whole.at("target_modules"), "model\\.layers\\.\\d+\\.self_attn\\.q_proj");
  EXPECT_FALSE(whole.contains("target_parameters"));
  EXPECT_EQ(peft_config(lora, "base", {.modules = {all[1]}, .all_modules = all}).at("target_modules"),
            json::array({all[1]}));
}

// PEFT 0.21 refuses dropout where it adapts parameters, and with transformers 5 it adapts parameters of an MoE model in
// all modules but those of attention.
TEST(PeftConfig, DropoutIsWrittenWherePeftCanLoadIt) {
  const LoraSpec lora{.rank = 4, .alpha = 8, .dropout = 0.1};
  const std::string attention = "model.layers.0.self_attn.q_proj", dense = "model.layers.0.mlp.up_proj",
                    router = "model.layers.1.mlp.gate", expert = "model.layers.1.mlp.experts.0.up_proj";
  const auto dropout = [&](const std::vector<std::string>& targets, const std::vector<std::string>& all) {
    return peft_config(lora, "base", {.modules = targets, .all_modules = all}).at("lora_dropout").get<double>();
  };
  const std::vector<std::string> moe{attention, dense, router, expert};
  EXPECT_EQ(dropout({attention}, moe), 0.1);
  EXPECT_EQ(dropout({attention, expert}, moe), 0.0);
  EXPECT_EQ(dropout({router}, moe), 0.0);
  EXPECT_EQ(dropout({dense}, moe), 0.0);
  EXPECT_EQ(dropout({attention, dense}, {attention, dense}), 0.1);
}

// PEFT 0.21 asks for the projections of experts by these names, with transformers 5.
TEST(PeftConfig, APatternOfExpertsMatchesTheirNamesWithoutANumberToo) {
  const LoraSpec lora{.rank = 4, .alpha = 8};
  const auto matches = [&](const std::string& module, const std::vector<std::string>& names) {
    const json config = peft_config(lora, "base", {.modules = {module}, .all_modules = {module}});
    const std::regex pattern(config.at("target_modules").get<std::string>());
    for (const std::string& name : names) EXPECT_TRUE(std::regex_match(name, pattern)) << name;
    EXPECT_FALSE(std::regex_match("model.layers.0.mlp.down_proj", pattern));
    EXPECT_FALSE(std::regex_match("model.layers.0.mlp.experts.3.down_proj", pattern));
  };
  matches("model.layers.0.mlp.experts.0.up_proj",
          {"model.layers.7.mlp.experts.12.up_proj", "model.layers.7.mlp.experts.up_proj"});
  matches("model.layers.0.block_sparse_moe.experts.0.w1",
          {"model.layers.7.block_sparse_moe.experts.12.w1", "model.layers.7.mlp.experts.w1"});
  matches("model.layers.0.block_sparse_moe.gate", {"model.layers.7.block_sparse_moe.gate", "model.layers.7.mlp.gate"});
}

TEST(PeftConfig, TargetParametersAreSuffixesOnlyIfTheseMatchExactly) {
  const std::vector<std::string> all{"model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.down_proj"};
  const LoraSpec lora{.rank = 4, .alpha = 8, .dropout = 0.1};
  const json whole = peft_config(lora, "base", {.parameters = all, .all_parameters = all});
  EXPECT_EQ(whole.at("target_parameters"), json::array({"mlp.experts.down_proj"}));
  EXPECT_EQ(whole.at("target_modules"), json::array());
  EXPECT_EQ(whole.at("lora_dropout"), 0.0);
  EXPECT_EQ(peft_config(lora, "base", {.parameters = {all[1]}, .all_parameters = all}).at("target_parameters"),
            json::array({all[1]}));
}

class PeftFolders : public testing::Test {
 protected:
  std::string refusal(const std::vector<std::string>& names) {
    write_file_atomic(dir_.path(kPeftConfig), plain_config().dump());
    const std::vector<float> zeros(8);
    std::vector<SafetensorsTensor> tensors;
    for (const std::string& name : names) tensors.push_back({{name, DType::f32, {8, 1}}, zeros.data()});
    write_safetensors(dir_.path(kPeftWeights), tensors);
    try {
      PeftFolder(dir_.path(), {.family = HfFamily::mixtral, .num_experts = 1, .hidden = 3, .intermediate = 2});
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  TestDir dir_;
};

TEST_F(PeftFolders, TensorsAreNamed) {
  const std::string gate = "base_model.model.model.layers.0.block_sparse_moe.gate.lora_A.weight";
  EXPECT_EQ(refusal({gate}), "");
  EXPECT_THAT(refusal({"model.norm.weight"}), HasSubstr("lora_B.weight; got model.norm.weight"));
  EXPECT_THAT(refusal({gate, "base_model.model.model.layers.0.mlp.gate.lora_A.weight"}),
              HasSubstr("expected a tensor once; got "));
}

TEST_F(PeftFolders, ExpertsHaveBothTensors) {
  const std::string experts = "base_model.model.model.layers.0.mlp.experts.";
  EXPECT_THAT(refusal({experts + "lora_A.weight"}),
              HasSubstr("expected a B for " + experts + "lora_A.weight; got none"));
  EXPECT_THAT(refusal({experts + "lora_B.weight"}),
              HasSubstr("expected an A for each B of experts; got 1 tensor, and 0 pairs of A and B"));
  EXPECT_THAT(refusal({experts + "lora_A.weight", experts + "lora_B.weight"}),
              HasSubstr("expected adapters of 1 experts [4, 3] and [3, 2] with rank 8"));
}

TEST_F(PeftFolders, BothFilesAreNeeded) {
  try {
    PeftFolder(dir_.path(), ExpertAdapters{});
    FAIL();
  } catch (const Error& e) {
    EXPECT_THAT(e.what(), HasSubstr("expected a folder of PEFT with adapter_config.json"));
  }
}

TEST_F(PeftFolders, APickleIsNamed) {
  write_file_atomic(dir_.path(kPeftConfig), plain_config().dump());
  write_file_atomic(dir_.path("adapter_model.bin"), "x");
  expect_error(ErrorKind::input, "got adapter_model.bin, a pickle", [&] { PeftFolder(dir_.path(), ExpertAdapters{}); });
}

}  // namespace
}  // namespace moebius
