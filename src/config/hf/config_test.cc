#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "config/hf/keys.h"
#include "config/model_spec.h"
#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

ModelSpec from(const json& config) { return model_spec_from_hf(config, "DIR/config.json"); }

json moebius_config() {
  return {{"model_type", "moebius"},    {"vocab_size", 11},
          {"hidden_size", 12},          {"num_hidden_layers", 4},
          {"num_attention_heads", 2},   {"intermediate_size", 20},
          {"moe_intermediate_size", 6}, {"max_position_embeddings", 33}};
}
json with(json config, const json& more) {
  config.update(more);
  return config;
}
std::string layers(const json& more) {
  std::string text;
  for (const bool moe : from(with(moebius_config(), more)).moe_layers) text += moe ? 'm' : '-';
  return text;
}

// What transformers 5.17 assumes when config.json says nothing but its model_type.
TEST(HfDefaults, Qwen3Moe) {
  const ModelSpec m = from({{"model_type", "qwen3_moe"}});
  EXPECT_EQ(m.vocab_size, 151936);
  EXPECT_EQ(m.hidden_size, 2048);
  EXPECT_EQ(m.num_layers, 24);
  EXPECT_EQ(m.num_heads, 32);
  EXPECT_EQ(m.num_kv_heads, 4);
  EXPECT_EQ(m.head_dim, 64);  // hidden_size / heads: the class has no default of its own
  EXPECT_EQ(m.intermediate_size, 6144);
  EXPECT_EQ(m.max_position_embeddings, 32768);
  EXPECT_EQ(m.rms_norm_eps, 1e-6);
  EXPECT_EQ(m.rope_theta, 1e4);
  EXPECT_EQ(m.initializer_range, 0.02);
  EXPECT_EQ(m.qk_norm, QkNorm::per_head);
  EXPECT_FALSE(m.tie_word_embeddings);
  EXPECT_EQ(m.sliding_window, 0);
  EXPECT_EQ(m.num_experts, 128);
  EXPECT_EQ(m.top_k, 8);
  EXPECT_EQ(m.moe_intermediate_size, 768);
  EXPECT_FALSE(m.norm_topk_prob);
  EXPECT_EQ(m.num_moe_layers(), 24);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, Mixtral) {
  const ModelSpec m = from({{"model_type", "mixtral"}});
  EXPECT_EQ(m.vocab_size, 32000);
  EXPECT_EQ(m.hidden_size, 4096);
  EXPECT_EQ(m.num_layers, 32);
  EXPECT_EQ(m.num_heads, 32);
  EXPECT_EQ(m.num_kv_heads, 8);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(m.intermediate_size, 0);
  EXPECT_EQ(m.max_position_embeddings, 131072);
  EXPECT_EQ(m.rms_norm_eps, 1e-5);
  EXPECT_EQ(m.rope_theta, 1e6);
  EXPECT_EQ(m.qk_norm, QkNorm::none);
  EXPECT_EQ(m.num_experts, 8);
  EXPECT_EQ(m.top_k, 2);
  EXPECT_EQ(m.moe_intermediate_size, 14336);
  EXPECT_TRUE(m.norm_topk_prob);
  EXPECT_EQ(m.num_moe_layers(), 32);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, Dense) {
  const ModelSpec llama = from({{"model_type", "llama"}});
  EXPECT_EQ(llama.vocab_size, 32000);
  EXPECT_EQ(llama.num_kv_heads, 32);
  EXPECT_EQ(llama.head_dim, 128);
  EXPECT_EQ(llama.intermediate_size, 11008);
  EXPECT_EQ(llama.max_position_embeddings, 2048);
  EXPECT_EQ(llama.rms_norm_eps, 1e-6);
  EXPECT_EQ(llama.rope_theta, 1e4);
  const ModelSpec mistral = from({{"model_type", "mistral"}});
  EXPECT_EQ(mistral.num_kv_heads, 8);
  EXPECT_EQ(mistral.intermediate_size, 14336);
  EXPECT_EQ(mistral.max_position_embeddings, 131072);
  EXPECT_EQ(mistral.sliding_window, 4096);
  EXPECT_EQ(mistral.rms_norm_eps, 1e-6);
  const ModelSpec qwen3 = from({{"model_type", "qwen3"}, {"hidden_size", 1024}});
  EXPECT_EQ(qwen3.vocab_size, 151936);
  EXPECT_EQ(qwen3.num_kv_heads, 32);
  EXPECT_EQ(qwen3.head_dim, 128);  // the class has a default of its own, whatever the hidden size
  EXPECT_EQ(qwen3.intermediate_size, 22016);
  EXPECT_EQ(qwen3.max_position_embeddings, 32768);
  EXPECT_EQ(qwen3.qk_norm, QkNorm::per_head);
  EXPECT_EQ(qwen3.sliding_window, 0);
  for (const ModelSpec& m : {llama, mistral, qwen3}) {
    EXPECT_EQ(m.num_layers, 32);
    EXPECT_EQ(m.num_moe_layers(), 0);
    EXPECT_NO_THROW(m.check());
  }
}

TEST(HfDefaults, Qwen2IsQwen3WithBiasesAndWithoutNorms) {
  const ModelSpec m = from({{"model_type", "qwen2"}});
  EXPECT_EQ(m.vocab_size, 151936);
  EXPECT_EQ(m.num_kv_heads, 32);
  EXPECT_EQ(m.head_dim, 128);
  EXPECT_EQ(from({{"model_type", "qwen2"}, {"hidden_size", 1024}}).head_dim, 32);  // no default of its own
  EXPECT_EQ(m.intermediate_size, 22016);
  EXPECT_EQ(m.qk_norm, QkNorm::none);
  EXPECT_TRUE(m.qkv_bias);
  EXPECT_EQ(m.sliding_window, 0);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, Qwen2Moe) {
  const ModelSpec m = from({{"model_type", "qwen2_moe"}});
  EXPECT_EQ(m.num_layers, 24);
  EXPECT_EQ(m.num_heads, 16);
  EXPECT_EQ(m.num_kv_heads, 16);
  EXPECT_EQ(m.num_experts, 60);
  EXPECT_EQ(m.top_k, 4);
  EXPECT_EQ(m.moe_intermediate_size, 1408);
  EXPECT_EQ(m.shared_intermediate_size, 5632);
  EXPECT_TRUE(m.shared_expert_gate);
  EXPECT_FALSE(m.norm_topk_prob);
  EXPECT_TRUE(m.qkv_bias);
  EXPECT_FALSE(from({{"model_type", "qwen2_moe"}, {"qkv_bias", false}}).qkv_bias);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, Olmoe) {
  const ModelSpec m = from({{"model_type", "olmoe"}});
  EXPECT_EQ(m.vocab_size, 50304);
  EXPECT_EQ(m.num_layers, 16);
  EXPECT_EQ(m.num_kv_heads, 16);
  EXPECT_EQ(m.intermediate_size, 0);
  EXPECT_EQ(m.moe_intermediate_size, 2048);
  EXPECT_EQ(from({{"model_type", "olmoe"}, {"intermediate_size", 1024}}).moe_intermediate_size, 1024);
  EXPECT_EQ(m.num_experts, 64);
  EXPECT_EQ(m.top_k, 8);
  EXPECT_EQ(m.rms_norm_eps, 1e-5);
  EXPECT_EQ(m.qk_norm, QkNorm::whole);
  EXPECT_FALSE(m.norm_topk_prob);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, MoebiusIsADenseModelOfTheGivenShapes) {
  const ModelSpec m = from(moebius_config());
  EXPECT_EQ(m.num_kv_heads, 2);
  EXPECT_EQ(m.head_dim, 6);
  EXPECT_EQ(m.num_experts, 0);
  EXPECT_EQ(m.num_moe_layers(), 0);
  EXPECT_EQ(m.moe_layers.size(), 4u);
  EXPECT_EQ(m.rms_norm_eps, 1e-6);
  EXPECT_EQ(m.rope_theta, 1e4);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, DeepseekV2) {
  const ModelSpec m = from({{"model_type", "deepseek_v2"}, {"num_experts_per_tok", 6}});
  EXPECT_EQ(m.vocab_size, 102400);
  EXPECT_EQ(m.num_layers, 32);
  EXPECT_EQ(m.num_kv_heads, 32);
  EXPECT_EQ(m.q_lora_rank, 1536);
  EXPECT_EQ(m.kv_lora_rank, 512);
  EXPECT_EQ(m.head_dim, 192);
  EXPECT_EQ(m.qk_nope_head_dim(), 128);
  EXPECT_EQ(m.rope_dim(), 64);
  EXPECT_EQ(m.v_head_dim, 128);
  EXPECT_TRUE(m.rope_interleave);
  EXPECT_EQ(m.num_experts, 64);
  EXPECT_EQ(m.moe_intermediate_size, 1407);
  EXPECT_EQ(m.shared_intermediate_size, 2 * 1407);
  EXPECT_EQ(m.num_moe_layers(), 32);
  EXPECT_EQ(m.score, ScoreFunction::softmax);
  EXPECT_FALSE(m.expert_bias);
  EXPECT_NO_THROW(m.check());
}

TEST(HfDefaults, DeepseekV3) {
  const ModelSpec m = from({{"model_type", "deepseek_v3"}});
  EXPECT_EQ(m.vocab_size, 129280);
  EXPECT_EQ(m.hidden_size, 7168);
  EXPECT_EQ(m.num_layers, 61);
  EXPECT_EQ(m.intermediate_size, 18432);
  EXPECT_EQ(m.head_dim, 192);
  EXPECT_EQ(m.num_moe_layers(), 58);
  EXPECT_FALSE(m.moe_layers[2]);
  EXPECT_EQ(m.num_experts, 256);
  EXPECT_EQ(m.shared_intermediate_size, 2048);
  EXPECT_EQ(m.score, ScoreFunction::sigmoid);
  EXPECT_EQ(m.group_score, GroupScore::sum_of_two);
  EXPECT_EQ(m.n_group, 8);
  EXPECT_EQ(m.topk_group, 4);
  EXPECT_EQ(m.routed_scaling_factor, 2.5);
  EXPECT_TRUE(m.norm_topk_prob);
  EXPECT_TRUE(m.expert_bias);
  EXPECT_NO_THROW(m.check());
  EXPECT_EQ(from({{"model_type", "deepseek_v3"}, {"q_lora_rank", nullptr}}).q_lora_rank, 0);
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

TEST(HfDefaults, GptOss) {
  const ModelSpec m = from({{"model_type", "gpt_oss"}});
  EXPECT_EQ(m.num_layers, 36);
  EXPECT_EQ(m.num_experts, 128);
  EXPECT_EQ(m.top_k, 4);
  EXPECT_EQ(m.moe_intermediate_size, 2880);
  EXPECT_EQ(m.intermediate_size, 0);
  EXPECT_EQ(m.head_dim, 64);
  EXPECT_EQ(m.rope_theta, 150000.0);
  EXPECT_EQ(m.rope_scaling.type, RopeType::yarn);
  EXPECT_FALSE(m.rope_scaling.truncate);
  EXPECT_TRUE(m.qkv_bias && m.o_bias && m.attention_sinks && m.router_bias && m.expert_proj_bias && m.norm_topk_prob);
  EXPECT_EQ(m.swiglu_limit, 7.0);
  EXPECT_EQ(m.window_of(0), 128);
  EXPECT_EQ(m.window_of(1), 0);
  EXPECT_EQ(m.window_of(34), 128);
  m.check();
  // The model card (arXiv 2508.10925) has 116.83 and 20.91 billion, and 3.61 billion active ones without the embedding.
  EXPECT_EQ(m.num_parameters(), 116829156672);
  const ModelSpec small = from({{"model_type", "gpt_oss"}, {"num_hidden_layers", 24}, {"num_local_experts", 32}});
  EXPECT_EQ(small.num_parameters(), 20914757184);
  EXPECT_NEAR(static_cast<double>(small.num_active_parameters() - int64_t{201088} * 2880), 3.61e9, 5e6);
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

// As transformers 5.17 takes them: the two tables are one to it, and what stands beside them goes into it.
TEST(HfRead, RopeInsideAndBesideATable) {
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

TEST(HfRead, KeysOfFilesAloneWithTheValueThatChangesNothing) {
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
TEST(HfRead, OtherNulls) {
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

struct Refused {
  json more;
  const char* text;
};

TEST(HfRead, RefusesWhatIsNotComputed) {
  const Refused cases[] = {
      {{{"model_type", "gpt2"}},
       "DIR/config.json: model_type must be one of \"deepseek_v2\", \"deepseek_v3\", "
       "\"gpt_oss\", \"llama\", \"mistral\", \"mixtral\", \"moebius\", \"olmoe\", "
       "\"qwen2\", \"qwen2_moe\", \"qwen3\", \"qwen3_moe\"; got \"gpt2\""},
      {{{"model_type", 3}}, "\"qwen3_moe\"; got 3"},
      {{{"hidden_act", "gelu"}}, "DIR/config.json: hidden_act must be \"silu\"; got \"gelu\""},
      {{{"clip_qkv", 0.0}}, "clip_qkv must be a finite number above 0, from 1e-37 to 1e+37; got 0.0"},
      {{{"clip_qkv", "x"}}, "clip_qkv must be a finite number above 0, from 1e-37 to 1e+37; got \"x\""},
      {{{"qk_norm", "half"}}, "qk_norm must be true (of each head), false or \"whole\" (of all heads together)"},
      {{{"sliding_window", 5}, {"layer_types", {"full_attention", "sliding_attention"}}},
       "layer_types must have one entry for each of the 4 layers; got 2"},
      {{{"sliding_window", 5}, {"layer_types", {"x", "x", "x", "x"}}},
       "layer_types must be \"full_attention\" or \"sliding_attention\"; got \"x\" for layer 0"},
      {{{"layer_types", 7}}, "layer_types must be a list of strings; got 7"},
      {{{"sliding_window", 0}, {"layer_types", {"x", "x", "x", "x"}}}, "got \"x\" for layer 0"},  // off, and odd
      {{{"num_experts_per_tok", nullptr}},
       "num_experts_per_tok must be a whole number from 0 to 1000000000; got null; give it, or remove the key"},
      {{{"n_shared_experts", nullptr}}, "n_shared_experts must be a whole number from 0 to 1000000000; got null"},
      {{{"n_group", 2}, {"topk_group", nullptr}}, "topk_group must be a whole number from 1 to 1000000000; got null"},
      {{{"sliding_window", 0}, {"layer_types", {"full_attention", "sliding_attention", "x", "x"}}},
       "got \"x\" for layer 2"},
      {{{"layer_types", {"full_attention", "sliding_attention", "full_attention", "full_attention"}}},
       "layer_types gives layer 1 a sliding window, "
       "but the model has none: sliding_window is not set; make them agree"},
      {{{"attention_dropout", 0.1}}, "attention_dropout must be 0: attention drops nothing here; got 0.1"},
      {{{"rope_scaling", {{"type", "longrope"}, {"factor", 4.0}}}},
       "rope_scaling of type \"longrope\" is not computed; expected \"default\", \"linear\", \"llama3\" or \"yarn\""},
      {{{"rope_parameters", {{"rope_type", "dynamic"}}}}, "rope_parameters of type \"dynamic\" is not computed"},
      {{{"rope_parameters", {{"rope_type", "llama3"}}}},
       "rope_parameters.factor must be given for RoPE of type \"llama3\""},
      {{{"rope_scaling", {{"type", "llama3"}, {"factor", 4}, {"low_freq_factor", 1}}}},
       "rope_scaling.high_freq_factor must be given for RoPE of type \"llama3\""},
      {{{"rope_scaling", {{"type", "llama3"}, {"factor", 4}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}}},
       "rope_scaling.high_freq_factor must be above low_freq_factor = 4; got 4"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 0}}}},
       "rope_scaling.factor must be a finite number above 0; got 0"},
      {{{"rope_scaling", {{"type", "yarn"}, {"truncate", 1}}}}, "rope_scaling.truncate must be true or false; got 1"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
        {"rope_parameters", {{"type", "linear"}, {"factor", 3}}}},
       "rope_scaling and rope_parameters contradict each other; keep one"},
      {{{"rope_theta", 2.0}, {"rope_scaling", {{"rope_theta", 3.0}}}},
       "rope_theta 2 and rope_scaling.rope_theta 3 contradict each other; keep one"},
      // transformers takes the first alone, with the theta of its class.
      {{{"rope_scaling", {{"rope_type", "default"}}}, {"rope_parameters", {{"type", "yarn"}, {"factor", 4}}}},
       "rope_scaling and rope_parameters contradict each other; keep one"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 2}}}, {"rope_parameters", {{"rope_theta", 77}}}},
       "rope_scaling and rope_parameters contradict each other; keep one"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 2}}},
        {"rope_parameters", {{"type", "linear"}, {"factor", 2}, {"rope_theta", 77}}}},
       "rope_scaling and rope_parameters contradict each other; keep one"},
      {{{"original_max_position_embeddings", 16},
        {"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", 32}}}},
       "original_max_position_embeddings 16 and "
       "rope_scaling.original_max_position_embeddings 32 contradict each other"},
      {{{"original_max_position_embeddings", 16.5}},
       "original_max_position_embeddings must be a whole number from 1 to 1000000000; got 16.5"},
      {{{"rope_scaling", {{"type", "linear"}, {"factor", 2}, {"mscale_all_dim", 1.0}}}},
       "rope_scaling.mscale_all_dim must be 0 for RoPE of type \"linear\", which scales no attention here; got 1.0"},
      {{{"is_causal", false}}, "is_causal must be true; got false"},
      {{{"is_causal", nullptr}}, "is_causal must be true; got null; give it, or remove the key"},
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor must be 1; got 0.5"},
      {{{"per_layer_config", {{"0", {{"rms_norm_eps", 0.5}}}}}}, "per_layer_config must be {}; got {\"0\""},
      {{{"kv_lora_rank", 4}, {"qk_rope_head_dim", 2}, {"num_key_value_heads", 1}},
       "num_key_value_heads must be num_attention_heads = 2 with latent attention; got 1"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}, "rope_parameters.partial_rotary_factor must be 1"},
      {{{"rope_parameters", {{"full_attention", json::object()}}}},
       "rope_parameters.full_attention gives RoPE per kind of layer"},
      {{{"rope_parameters", {{"rope_theta", "x"}}}},
       "rope_parameters.rope_theta must be a finite number above 0; got \"x\""},
      {{{"rope_theta", 2.0}, {"rope_parameters", {{"rope_theta", 3.0}}}},
       "rope_theta 2 and rope_parameters.rope_theta 3 contradict"},
      {{{"hidden_size", "big"}}, "hidden_size must be a whole number from 1 to 1000000000; got \"big\""},
      {{{"hidden_size", 12.5}}, "hidden_size must be a whole number from 1 to 1000000000; got 12.5"},
      {{{"vocab_size", nullptr}}, "vocab_size must be a whole number from 1 to 1000000000; got null; give it"},
      {{{"max_position_embeddings", nullptr}}, "max_position_embeddings must be a whole number from 1 to 1000000000"},
      {{{"num_hidden_layers", 1 << 20}}, "num_hidden_layers must be a whole number from 1 to 65536"},
      {{{"num_experts", 4}, {"n_routed_experts", 8}}, "num_experts = 4 and n_routed_experts = 8 contradict each other"},
      {{{"n_shared_experts", 1}, {"shared_expert_intermediate_size", 8}},
       "n_shared_experts and shared_expert_intermediate_size both"},
      {{{"topk_method", "noaux_tc"}, {"expert_bias", false}}, "topk_method already says group_score and expert_bias"},
      {{{"topk_method", "random"}},
       "topk_method must be \"greedy\" or \"group_limited_greedy\" or \"noaux_tc\"; got \"random\""},
      {{{"scoring_func", "tanh"}}, "scoring_func must be \"softmax\" or \"sigmoid\"; got \"tanh\""},
      {{{"moe_layer_freq", {0, 1}}}, "moe_layer_freq must have one entry for each of the 4 layers; got 2"},
      {{{"moe_layer_freq", {0, 2}}}, "moe_layer_freq must be a whole number of at least 1 or a list of 0 and 1"},
      {{{"mlp_only_layers", {0, -1}}}, "mlp_only_layers must be a list of layer numbers; got [0,-1]"},
  };
  for (const Refused& refused : cases) {
    const json config = with(moebius_config(), refused.more);
    EXPECT_THAT(error_text(ErrorKind::input, [&] { from(config); }), HasSubstr(refused.text));
  }
  EXPECT_THAT(error_text(ErrorKind::input, [] { from(json::array()); }),
              HasSubstr("DIR/config.json: expected a JSON object; got []"));
  EXPECT_THAT(error_text(ErrorKind::input, [] { from(json::object()); }), HasSubstr("got null"));
}

TEST(HfRead, RefusesWhatIsNotComputedOfOneFamily) {
  const Refused cases[] = {
      {{{"model_type", "olmoe"}, {"clip_qkv", -8.0}},
       "clip_qkv must be a finite number above 0, from 1e-37 to 1e+37; got -8.0"},
      {{{"model_type", "olmoe"}, {"head_dim", 64}},
       "head_dim must be hidden_size / num_attention_heads for model_type \"olmoe\""},
      {{{"model_type", "llama"}, {"mlp_bias", true}},
       "mlp_bias must be false: gate, up and down have no bias here; got true"},
      {{{"model_type", "gpt_oss"}, {"swiglu_limit", 6.5}},
       "swiglu_limit must be 7 for model_type \"gpt_oss\", whose readers disagree on what it does; got 6.5"},
      {{{"model_type", "deepseek_v2"}, {"norm_topk_prob", true}},
       "norm_topk_prob must be false for model_type \"deepseek_v2\", whose readers disagree on what it does; got true"},
      {{{"model_type", "deepseek_v2"}, {"topk_method", "noaux_tc"}},
       "topk_method must be \"greedy\" or \"group_limited_greedy\" for model_type \"deepseek_v2\""},
      {{{"model_type", "deepseek_v2"}, {"scoring_func", "sigmoid"}}, "scoring_func must be \"softmax\" for model_type"},
      {{{"model_type", "deepseek_v3"}, {"topk_method", "greedy"}}, "topk_method must be \"noaux_tc\" for model_type"},
      {{{"model_type", "deepseek_v3"}, {"moe_layer_freq", 2}},
       "moe_layer_freq must be 1 for model_type \"deepseek_v3\"; got 2"},
      {{{"model_type", "mistral"}, {"num_hidden_layers", 2}, {"layer_types", {"full_attention", "sliding_attention"}}},
       "layer_types gives 1 of 2 layers a sliding window; expected all of them for model_type \"mistral\", or a "
       "sliding_window of null, since transformers has the window in all layers"},
      {{{"model_type", "mistral"}, {"num_hidden_layers", 2}, {"layer_types", {"full_attention", "full_attention"}}},
       "layer_types gives 0 of 2 layers a sliding window; expected all of them for model_type \"mistral\""},
      {{{"model_type", "mixtral"}, {"sliding_window", 0}},
       "sliding_window must be at least 1, or null for none; got 0"},
      {{{"model_type", "qwen3_moe"}, {"sliding_window", 0}, {"use_sliding_window", true}},
       "sliding_window must be at least 1, or null for none; got 0"},
      {{{"model_type", "gpt_oss"}, {"sliding_window", 0}},
       "sliding_window must be at least 1, or null for none; got 0"},
      {{{"model_type", "gpt_oss"}, {"sliding_window", nullptr}},
       "sliding_window must be a whole number from 0 to 1000000000; got null; give it, or remove the key"},
      {{{"model_type", "qwen3"}, {"num_hidden_layers", 2}, {"layer_types", {"full_attention", "sliding_attention"}}},
       "layer_types gives layer 1 a sliding window, but the model has none: sliding_window is switched off by "
       "use_sliding_window; make them agree"},
      {{{"model_type", "qwen2"},
        {"num_hidden_layers", 2},
        {"use_sliding_window", true},
        {"sliding_window", nullptr},
        {"layer_types", {"sliding_attention", "sliding_attention"}}},
       "layer_types gives layer 0 a sliding window, but the model has none: sliding_window is not set"},
      {{{"model_type", "deepseek_v2"}, {"topk_method", "group_limited_greedy"}, {"n_group", nullptr}},
       "n_group must be given for topk_method \"group_limited_greedy\""},
      {{{"model_type", "deepseek_v2"}, {"topk_method", "group_limited_greedy"}, {"n_group", 4}},
       "topk_group must be given for topk_method \"group_limited_greedy\""},
      {{{"model_type", "deepseek_v3"}, {"norm_topk_prob", nullptr}}, "norm_topk_prob must be true or false; got null"},
      {{{"model_type", "deepseek_v3"}, {"topk_group", nullptr}}, "topk_group must be a whole number from 1 to"},
      {{{"model_type", "qwen3_moe"}, {"num_hidden_layers", 2}, {"layer_types", {"full_attention", "x"}}},
       "layer_types must be \"full_attention\" or \"sliding_attention\"; got \"x\" for layer 1"},
      {{{"model_type", "olmoe"}, {"layer_types", {"full_attention"}}},
       "layer_types must have one entry for each of the 16 layers; got 1"},
      {{{"model_type", "llama"}, {"layer_types", "full_attention"}},
       "layer_types must have one entry for each of the 32 layers; got \"full_attention\""},
      {{{"model_type", "llama"}, {"attention_bias", nullptr}}, "attention_bias must be true or false; got null"},
      {{{"model_type", "qwen2_moe"}, {"use_sliding_window", true}},
       "use_sliding_window needs layer_types for model_type \"qwen2_moe\"; give them"},
      {{{"model_type", "qwen2_moe"}, {"use_sliding_window", true}, {"sliding_window", nullptr}},
       "use_sliding_window needs a sliding_window for model_type \"qwen2_moe\"; got null"},
  };
  for (const Refused& refused : cases) {
    EXPECT_THAT(error_text(ErrorKind::input, [&] { from(refused.more); }), HasSubstr(refused.text));
  }
}

TEST(HfWrite, ReadsBackToTheSameSpec) {
  for (json config :
       {json{{"model_type", "qwen3_moe"}, {"mlp_only_layers", {0, 5}}, {"use_sliding_window", true}},
        json{{"model_type", "mixtral"}, {"sliding_window", 9}},
        json{{"model_type", "llama"}, {"tie_word_embeddings", true}, {"num_key_value_heads", 4}},
        json{{"model_type", "mistral"}, {"sliding_window", nullptr}, {"head_dim", 160}},
        json{{"model_type", "mistral"}, {"rope_theta", 5e5}},
        json{{"model_type", "qwen3"}, {"num_hidden_layers", 3}},
        json{{"model_type", "qwen2"}, {"tie_word_embeddings", true}},
        json{{"model_type", "qwen2_moe"}, {"mlp_only_layers", {1}}, {"qkv_bias", false}},
        json{{"model_type", "qwen2_moe"},
             {"num_hidden_layers", 2},
             {"use_sliding_window", true},
             {"layer_types", {"sliding_attention", "sliding_attention"}}},
        json{{"model_type", "deepseek_v3"}, {"rope_interleave", false}, {"n_shared_experts", 2}},
        json{{"model_type", "deepseek_v3"},
             {"q_lora_rank", nullptr},
             {"first_k_dense_replace", 1},
             {"rope_scaling", {{"type", "yarn"}, {"factor", 40}, {"mscale", 1.0}, {"mscale_all_dim", 1.0}}}},
        json{{"model_type", "deepseek_v2"}, {"num_experts_per_tok", 6}, {"topk_method", "greedy"}, {"n_group", 8}},
        json{{"model_type", "deepseek_v2"},
             {"num_experts_per_tok", 6},
             {"topk_method", "group_limited_greedy"},
             {"n_group", 8},
             {"topk_group", 3}},
        json{{"model_type", "deepseek_v2"},
             {"num_experts_per_tok", 6},
             {"topk_method", "group_limited_greedy"},
             {"n_group", 1},
             {"topk_group", 1}},
        json{{"model_type", "llama"},
             {"rope_parameters",
              {{"rope_type", "llama3"}, {"factor", 8}, {"low_freq_factor", 1}, {"high_freq_factor", 4}}}},
        json{{"model_type", "qwen3"}, {"rope_scaling", {{"type", "linear"}, {"factor", 3}}}},
        with(moebius_config(), {{"kv_lora_rank", 4}, {"qk_nope_head_dim", 3}, {"qk_rope_head_dim", 2}}),
        with(moebius_config(),
             {{"kv_lora_rank", 4}, {"qk_nope_head_dim", 3}, {"qk_rope_head_dim", 2}, {"attention_bias", true}}),
        json{{"model_type", "olmoe"}, {"norm_topk_prob", true}, {"num_key_value_heads", 4}},
        json{{"model_type", "olmoe"}, {"clip_qkv", 8}, {"attention_bias", true}},
        json{{"model_type", "llama"}, {"attention_bias", true}},
        json{{"model_type", "qwen3"}, {"attention_bias", true}},
        json{{"model_type", "qwen3_moe"}, {"attention_bias", true}},
        json{{"model_type", "deepseek_v2"}, {"attention_bias", true}, {"num_experts_per_tok", 6}},
        json{{"model_type", "deepseek_v3"}, {"attention_bias", true}, {"q_lora_rank", nullptr}},
        with(moebius_config(), {{"clip_qkv", 0.5}, {"attention_bias", true}, {"qk_norm", false}}),
        json{{"model_type", "qwen3"}, {"use_sliding_window", true}, {"max_window_layers", 0}},
        with(moebius_config(), {{"qk_norm", "whole"}, {"qkv_bias", true}}),
        with(moebius_config(), {{"moe_layer_freq", 2}, {"num_experts", 4}}),
        json{{"model_type", "gpt_oss"}},
        json{{"model_type", "gpt_oss"}, {"attention_bias", false}, {"layer_types", json(36, "full_attention")}},
        json{{"model_type", "gpt_oss"}, {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 500}}}},
        json{{"model_type", "qwen2"}, {"use_sliding_window", true}},
        with(moebius_config(), {{"num_experts", 4}, {"moe_intermediate_size", 6}, {"swiglu_limit", 5}}),
        with(moebius_config(), {{"num_experts", 4},
                                {"moe_intermediate_size", 6},
                                {"attention_bias", true},
                                {"attention_sinks", true},
                                {"mlp_bias", true},
                                {"router_bias", true}}),
        with(moebius_config(), {{"topk_method", "group_limited_greedy"}, {"n_shared_experts", 2}})}) {
    ModelSpec m = from(config);
    ModelSpec again = from(hf_from_model_spec(m));
    m.source = again.source = {};
    EXPECT_EQ(again, m) << config;
  }
}

TEST(HfWrite, ScaledRopeInV4SpellingWithItsUnknownEntries) {
  const ModelSpec m =
      from({{"model_type", "deepseek_v3"},
            {"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "yarn"}, {"factor", 4}, {"finetuned", true}}}});
  const json config = hf_from_model_spec(m);
  EXPECT_FALSE(config.contains("rope_parameters"));
  EXPECT_EQ(config.at("rope_theta"), 5e5);
  EXPECT_EQ(config.at("rope_scaling"), (json{{"type", "yarn"},
                                             {"rope_type", "yarn"},
                                             {"factor", 4.0},
                                             {"original_max_position_embeddings", 4096},
                                             {"beta_fast", 32.0},
                                             {"beta_slow", 1.0},
                                             {"truncate", true},
                                             {"finetuned", true}}));
}

TEST(HfWrite, KeepsUnknownKeysAndWritesV4Spelling) {
  const ModelSpec m = from({{"model_type", "qwen3_moe"},
                            {"num_local_experts", 16},
                            {"dtype", "bfloat16"},
                            {"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "default"}}},
                            {"router_aux_loss_coef", 0.01},
                            {"architectures", {"Qwen3MoeForCausalLM"}}});
  const json config = hf_from_model_spec(m);
  EXPECT_EQ(config.at("torch_dtype"), "bfloat16");
  EXPECT_FALSE(config.contains("dtype"));
  EXPECT_EQ(config.at("rope_theta"), 5e5);
  EXPECT_FALSE(config.contains("rope_parameters"));
  EXPECT_EQ(config.at("num_experts"), 16);
  EXPECT_FALSE(config.contains("num_local_experts"));
  EXPECT_EQ(config.at("router_aux_loss_coef"), 0.01);
  EXPECT_EQ(config.at("architectures"), json{"Qwen3MoeForCausalLM"});
  EXPECT_EQ(config.at("use_sliding_window"), false);
  EXPECT_TRUE(config.at("sliding_window").is_null());
}

}  // namespace
}  // namespace moebius
