// The values of a config.json that gives its model_type and little else.
#include <gtest/gtest.h>

#include "config/hf/testing.h"

namespace moebius {
namespace {

using nlohmann::json;

// These are the values that transformers 5.17 assumes when config.json gives only its model_type.
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
  // The model card (arXiv 2508.10925) has 116.83 and 20.91 billion, and 3.61 billion active ones
  // without the embedding.
  EXPECT_EQ(m.num_parameters(), 116829156672);
  const ModelSpec small = from({{"model_type", "gpt_oss"}, {"num_hidden_layers", 24}, {"num_local_experts", 32}});
  EXPECT_EQ(small.num_parameters(), 20914757184);
  EXPECT_NEAR(static_cast<double>(small.num_active_parameters() - int64_t{201088} * 2880), 3.61e9, 5e6);
}

}  // namespace
}  // namespace moebius
