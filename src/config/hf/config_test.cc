// Reads config.json files: both spellings of keys, and keys that depend on each other.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/hf/keys.h"
#include "config/hf/testing.h"
#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

std::string layers(const json& more) {
  std::string text;
  for (const bool moe : from(with(moebius_config(), more)).moe_layers) text += moe ? 'm' : '-';
  return text;
}

// Both spellings; what a config does not say is not there.
TEST(HfRead, MultiTokenPrediction) {
  EXPECT_EQ(from({{"model_type", "deepseek_v3"}}).num_mtp_layers, 0);
  for (const char* key : {"num_nextn_predict_layers", "num_mtp_layers"}) {
    const ModelSpec m = from({{"model_type", "deepseek_v3"}, {key, 1}});
    EXPECT_EQ(m.num_mtp_layers, 1) << key;
    EXPECT_TRUE(m.is_moe_layer(61));
    EXPECT_NO_THROW(m.check());
    const json written = hf_from_model_spec(m);
    EXPECT_EQ(written.at("num_nextn_predict_layers"), 1);
    EXPECT_FALSE(written.contains("num_mtp_layers"));
  }
  EXPECT_EQ(from({{"model_type", "qwen3_moe"}, {"num_mtp_layers", 1}}).num_mtp_layers, 0)
      << "a key of no meaning there";
  EXPECT_THAT(
      error_text(ErrorKind::input,
                 [] {
                   from({{"model_type", "deepseek_v3"}, {"num_nextn_predict_layers", 1}, {"num_mtp_layers", 2}});
                 }),
      HasSubstr("num_nextn_predict_layers = 1 and num_mtp_layers = 2 contradict each other"));
}

TEST(HfRead, GptOssVariants) {
  const auto gpt_oss = [](const json& more) { return from(with({{"model_type", "gpt_oss"}}, more)); };
  const json full(36, "full_attention");
  const ModelSpec bare = gpt_oss({{"attention_bias", false}, {"sliding_window", 7}, {"layer_types", full}});
  EXPECT_EQ(hf_from_model_spec(bare).at("sliding_window"), 7);  // transformers refuses null
  ModelSpec without_source = bare;
  without_source.source = {};
  EXPECT_EQ(hf_from_model_spec(without_source).at("sliding_window"), 128);
  EXPECT_FALSE(bare.qkv_bias || bare.o_bias);
  EXPECT_EQ(bare.window_of(0), 0);
  // Its class takes a missing rope_scaling and one of null for YaRN.
  EXPECT_EQ(gpt_oss({{"rope_scaling", nullptr}}).rope_scaling.type, RopeType::yarn);
  EXPECT_EQ(gpt_oss({{"rope_scaling", {{"rope_type", "default"}}}}).rope_scaling.type, RopeType::plain);
  EXPECT_EQ(hf_from_model_spec(gpt_oss({{"rope_scaling", {{"rope_type", "default"}}}})).at("rope_scaling"),
            (json{{"rope_type", "default"}}));
}

TEST(HfRead, ScaledRope) {
  const json yarn = {{"type", "yarn"}, {"factor", 40}, {"mscale", 1.0}, {"mscale_all_dim", 0.5}, {"beta_fast", 30}};
  const json llama3 = {{"rope_type", "llama3"},
                       {"factor", 8.0},
                       {"low_freq_factor", 1.0},
                       {"high_freq_factor", 4.0},
                       {"original_max_position_embeddings", 8192}};
  const auto scaling = [](const char* key, const json& table) {
    return from({{"model_type", "llama"}, {"max_position_embeddings", 4096}, {key, table}}).rope_scaling;
  };
  const RopeScaling by_yarn{.type = RopeType::yarn,
                            .factor = 40,
                            .original_positions = 4096,
                            .beta_fast = 30,
                            .mscale = 1,
                            .mscale_all_dim = 0.5};
  EXPECT_EQ(scaling("rope_scaling", yarn), by_yarn);
  EXPECT_EQ(scaling("rope_parameters", yarn), by_yarn);
  // Without a factor it is that of the lengths.
  EXPECT_EQ(scaling("rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 1024}}).factor, 4.0);
  // A null is no factor, and in transformers it is false.
  const json nulls = {{"type", "yarn"}, {"factor", nullptr}, {"beta_fast", nullptr}, {"truncate", nullptr}};
  EXPECT_EQ(scaling("rope_scaling", nulls),
            (RopeScaling{.type = RopeType::yarn, .original_positions = 4096, .truncate = false}));
  EXPECT_EQ(scaling("rope_parameters", llama3).original_positions, 8192);
  EXPECT_EQ(scaling("rope_scaling", {{"type", "linear"}, {"factor", 2}}),
            (RopeScaling{.type = RopeType::linear, .factor = 2}));
}

TEST(HfRead, BothSpellingsOfRope) {
  EXPECT_EQ(from({{"model_type", "mixtral"}, {"rope_theta", 500}, {"rope_scaling", nullptr}}).rope_theta, 500.0);
  const json v5 = {{"rope_theta", 5e5}, {"rope_type", "default"}};
  EXPECT_EQ(from({{"model_type", "mixtral"}, {"rope_parameters", v5}}).rope_theta, 5e5);
  EXPECT_EQ(from({{"model_type", "mixtral"}, {"rope_parameters", {{"rope_type", "default"}}}}).rope_theta, 1e6);
}

// transformers 5.17 reads the two tables as one, and merges the keys beside them into it.
TEST(HfRead, RopeInsideAndOutsideOfATable) {
  const auto llama = [](const json& more) {
    return from(with({{"model_type", "llama"}, {"max_position_embeddings", 4096}}, more));
  };
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    EXPECT_EQ(llama({{key, {{"type", "linear"}, {"factor", 2}, {"rope_theta", 77}}}}).rope_theta, 77.0) << key;
    EXPECT_EQ(llama({{key, {{"rope_type", "default"}, {"rope_theta", 77}}}}).rope_theta, 77.0) << key;
    const ModelSpec m = llama({{"original_max_position_embeddings", 1024}, {key, {{"type", "yarn"}}}});
    EXPECT_EQ(m.rope_scaling.original_positions, 1024) << key;
    EXPECT_EQ(m.rope_scaling.factor, 4.0) << key;
    const json written = hf_from_model_spec(m);
    EXPECT_FALSE(written.contains("original_max_position_embeddings"));
    EXPECT_EQ(from(written).rope_scaling, m.rope_scaling);
  }
  const json both = {{"type", "linear"}, {"factor", 2}, {"rope_theta", 77}};
  EXPECT_EQ(llama({{"rope_scaling", both}, {"rope_parameters", both}}).rope_theta, 77.0);
  EXPECT_EQ(llama({{"rope_scaling", json::object()}, {"rope_parameters", both}}).rope_scaling.factor, 2.0);
  // Without a table gpt_oss has YaRN, and an empty one is a table.
  const ModelSpec bare = from({{"model_type", "gpt_oss"}, {"original_max_position_embeddings", 64}, {"rope_theta", 7}});
  EXPECT_EQ(bare.rope_scaling.original_positions, 64);
  EXPECT_EQ(bare.rope_theta, 7.0);
  EXPECT_EQ(from({{"model_type", "gpt_oss"}, {"rope_parameters", json::object()}}).rope_scaling.type, RopeType::plain);
}

TEST(HfRead, KeysOfFilesOnlyAcceptValuesWithoutEffect) {
  EXPECT_NO_THROW(from(with(moebius_config(), {{"is_causal", true}, {"partial_rotary_factor", 1.0}})));
  EXPECT_NO_THROW(from(with(moebius_config(), {{"per_layer_config", nullptr}, {"partial_rotary_factor", nullptr}})));
  for (const HfKey& key : hf_file_keys()) EXPECT_EQ(find_hf_key(key.name), nullptr) << key.name;
}

TEST(HfRead, EverySpellingOfTheExpertCount) {
  for (const char* key : {"num_experts", "n_routed_experts", "num_local_experts"}) {
    EXPECT_EQ(from(with(moebius_config(), {{key, 6}})).num_experts, 6) << key;
  }
  // transformers 5 writes num_local_experts into a qwen3_moe config.
  EXPECT_EQ(from({{"model_type", "qwen3_moe"}, {"num_local_experts", 16}}).num_experts, 16);
}

TEST(HfRead, NullHeadsAndWindow) {
  const ModelSpec m = from({{"model_type", "mixtral"},
                            {"num_key_value_heads", nullptr},
                            {"head_dim", nullptr},
                            {"sliding_window", nullptr}});
  EXPECT_EQ(m.num_kv_heads, 32);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.sliding_window, 0);
  EXPECT_EQ(from({{"model_type", "mixtral"}, {"sliding_window", 4096}}).sliding_window, 4096);
  EXPECT_EQ(from({{"model_type", "qwen3_moe"}, {"sliding_window", 77}}).sliding_window, 0);
  EXPECT_EQ(from({{"model_type", "qwen3_moe"}, {"sliding_window", 77}, {"use_sliding_window", true}}).sliding_window,
            77);
  EXPECT_EQ(from({{"model_type", "qwen3_moe"}, {"use_sliding_window", true}}).sliding_window, 4096);
}

// The families that have a meaning for it, as transformers.
TEST(HfRead, NullsMeanTheDefaultsOfTransformers) {
  EXPECT_NO_THROW(from({{"model_type", "llama"}, {"attention_dropout", nullptr}, {"rope_scaling", nullptr}}));
  const ModelSpec m =
      from({{"model_type", "deepseek_v3"}, {"num_nextn_predict_layers", nullptr}, {"scoring_func", nullptr}});
  EXPECT_EQ(m.num_mtp_layers, 0);
  EXPECT_EQ(m.score, ScoreFunction::sigmoid);
  EXPECT_FALSE(from({{"model_type", "deepseek_v3"}, {"rope_interleave", nullptr}}).rope_interleave);
  EXPECT_EQ(from({{"model_type", "olmoe"}, {"clip_qkv", nullptr}}).clip_qkv, 0);
  EXPECT_EQ(from({{"model_type", "deepseek_v2"}, {"n_group", nullptr}, {"topk_group", nullptr}}).n_group, 1);
}

TEST(HfRead, WindowByLayer) {
  const auto windows = [](const json& more) {
    const ModelSpec m = from(with({{"num_hidden_layers", 4}, {"sliding_window", 7}}, more));
    m.check();
    std::vector<int64_t> all;
    for (int64_t i = 0; i < 4; ++i) all.push_back(m.window_of(i));
    return all;
  };
  using Windows = std::vector<int64_t>;
  const json mixed = {"full_attention", "sliding_attention", "full_attention", "full_attention"};
  EXPECT_EQ(windows(with(moebius_config(), {{"num_hidden_layers", 4}, {"sliding_window", 7}, {"layer_types", mixed}})),
            (Windows{0, 7, 0, 0}));
  EXPECT_EQ(windows({{"model_type", "qwen3"}, {"use_sliding_window", true}, {"max_window_layers", 3}}),
            (Windows{0, 0, 0, 7}));
  EXPECT_EQ(windows({{"model_type", "gpt_oss"}}), (Windows{7, 0, 7, 0}));
  EXPECT_EQ(windows({{"model_type", "gpt_oss"}, {"layer_types", mixed}}), (Windows{0, 7, 0, 0}));
  EXPECT_EQ(windows({{"model_type", "gpt_oss"}, {"layer_types", json(4, "full_attention")}}), (Windows{0, 0, 0, 0}));
}

TEST(HfRead, WindowOfAllLayersOrNone) {
  const json qwen3 = {{"model_type", "qwen3"}, {"num_hidden_layers", 4}, {"sliding_window", 7}};
  const auto window = [&](const json& more) { return from(with(qwen3, more)).sliding_window; };
  EXPECT_EQ(window(json::object()), 0);
  EXPECT_EQ(window({{"use_sliding_window", true}}), 0);  // from layer 28 on
  EXPECT_EQ(window({{"use_sliding_window", true}, {"max_window_layers", 4}}), 0);
  EXPECT_EQ(window({{"use_sliding_window", true}, {"max_window_layers", 0}}), 7);
  const json sliding(4, "sliding_attention"), full(4, "full_attention");
  EXPECT_EQ(window({{"use_sliding_window", true}, {"max_window_layers", 4}, {"layer_types", sliding}}), 7);
  EXPECT_EQ(window({{"use_sliding_window", true}, {"max_window_layers", 0}, {"layer_types", full}}), 0);
  EXPECT_EQ(from({{"model_type", "llama"}, {"sliding_window", 7}}).sliding_window, 0);
}

TEST(HfRead, MoeLayerPatterns) {
  EXPECT_EQ(layers({{"num_experts", 0}}), "----");
  EXPECT_EQ(layers({{"num_experts", 4}}), "mmmm");
  EXPECT_EQ(layers({{"num_experts", 4}, {"first_k_dense_replace", 1}}), "-mmm");
  EXPECT_EQ(layers({{"num_experts", 4}, {"moe_layer_freq", 2}}), "m-m-");
  EXPECT_EQ(layers({{"num_experts", 4}, {"moe_layer_freq", {0, 1, 1, 0}}}), "-mm-");
  EXPECT_EQ(layers({{"num_experts", 4}, {"decoder_sparse_step", 2}}), "-m-m");
  EXPECT_EQ(layers({{"num_experts", 4}, {"mlp_only_layers", {1, 3}}}), "m-m-");
  EXPECT_EQ(layers({{"num_experts", 4}, {"first_k_dense_replace", 1}, {"mlp_only_layers", {3}}}), "-mm-");
}

TEST(HfRead, DeepSeekRouter) {
  const json v3 = {
      {"n_routed_experts", 8}, {"num_experts_per_tok", 4},  {"scoring_func", "sigmoid"}, {"n_group", 4},
      {"topk_group", 2},       {"topk_method", "noaux_tc"}, {"norm_topk_prob", true},    {"routed_scaling_factor", 2.5},
      {"n_shared_experts", 2}};
  const ModelSpec m = from(with(moebius_config(), v3));
  EXPECT_EQ(m.score, ScoreFunction::sigmoid);
  EXPECT_TRUE(m.expert_bias);
  EXPECT_EQ(m.group_score, GroupScore::sum_of_two);
  EXPECT_EQ(m.n_group, 4);
  EXPECT_EQ(m.topk_group, 2);
  EXPECT_EQ(m.routed_scaling_factor, 2.5);
  EXPECT_EQ(m.shared_intermediate_size, 12);
  EXPECT_FALSE(m.shared_expert_gate);
  EXPECT_NO_THROW(m.check());
  const ModelSpec v2 = from(with(with(moebius_config(), v3), {{"topk_method", "group_limited_greedy"}}));
  EXPECT_EQ(v2.group_score, GroupScore::max);
  EXPECT_FALSE(v2.expert_bias);
  EXPECT_EQ(from(with(with(moebius_config(), v3), {{"topk_method", "greedy"}})).n_group, 1);
}

TEST(HfRead, KeysOfOtherFamiliesHaveNoEffect) {
  const ModelSpec m =
      from({{"model_type", "qwen3_moe"}, {"n_shared_experts", 3}, {"scoring_func", "sigmoid"}, {"qk_norm", false}});
  EXPECT_EQ(m.shared_intermediate_size, 0);
  EXPECT_EQ(m.score, ScoreFunction::softmax);
  EXPECT_EQ(m.qk_norm, QkNorm::per_head);
}

}  // namespace
}  // namespace moebius
