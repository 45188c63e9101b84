// A model's config.json as it is written.
#include <gtest/gtest.h>

#include "config/hf/testing.h"

namespace moebius {
namespace {

using nlohmann::json;

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

// The class of transformers has no such key, so programs that use it find it only in the file.
TEST(HfWrite, DeepseekHasTheFrequencyOfItsMoeLayers) {
  EXPECT_EQ(hf_from_model_spec(from({{"model_type", "deepseek_v3"}, {"moe_layer_freq", 1}})).at("moe_layer_freq"), 1);
  EXPECT_EQ(hf_from_model_spec(from({{"model_type", "deepseek_v3"}})).at("moe_layer_freq"), 1);
}

// swiglu_alpha is a key of gpt_oss. Other families pass it through unread.
TEST(HfWrite, AKeyOfOneFamilyIsUnknownInTheOthers) {
  EXPECT_EQ(hf_from_model_spec(from({{"model_type", "llama"}, {"swiglu_alpha", 1.0}})).at("swiglu_alpha"), 1.0);
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
