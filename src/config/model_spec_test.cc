#include "config/model_spec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "config/testing.h"
#include "core/error.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

ModelSpec from(const json& config) { return model_spec_from_hf(config, "config.json"); }

// Dimensions as released; vocabulary sizes as in the reference that the check values come from.
json qwen3_30b() {
  return {{"model_type", "qwen3_moe"}, {"hidden_size", 2048},      {"num_hidden_layers", 48},
          {"num_attention_heads", 32}, {"num_key_value_heads", 4}, {"head_dim", 128},
          {"num_experts", 128},        {"num_experts_per_tok", 8}, {"moe_intermediate_size", 768}};
}
json qwen3_235b() {
  json config = qwen3_30b();
  config.update(
      {{"hidden_size", 4096}, {"num_hidden_layers", 94}, {"num_attention_heads", 64}, {"moe_intermediate_size", 1536}});
  return config;
}

TEST(TrainFlops, CheckValuesOfReleasedModels) {
  const auto gflop = [](const json& config, int64_t seq_len) {
    return from(config).train_flops_per_token(seq_len) / 1e9;
  };
  EXPECT_NEAR(gflop(qwen3_30b(), 4096), 23.01, 0.005);
  EXPECT_NEAR(gflop(qwen3_30b(), 262144), 327.4, 0.05);
  EXPECT_NEAR(gflop(qwen3_235b(), 4096), 148.03, 0.005);
  EXPECT_NEAR(gflop({{"model_type", "mixtral"}}, 4096), 79.71, 0.005);
  EXPECT_NEAR(gflop({{"model_type", "mixtral"},
                     {"hidden_size", 6144},
                     {"intermediate_size", 16384},
                     {"num_hidden_layers", 56},
                     {"num_attention_heads", 48},
                     {"vocab_size", 32768}},
                    4096),
              242.20, 0.005);
}

TEST(TrainFlops, LatentAttentionAndMultiTokenPrediction) {
  json config{{"model_type", "deepseek_v3"}};
  EXPECT_NEAR(from(config).train_flops_per_token(4096) / 1e9, 249.81, 0.005);
  config["num_nextn_predict_layers"] = 1;
  EXPECT_NEAR(from(config).train_flops_per_token(4096) / 1e9, 259.99, 0.005);
  EXPECT_NEAR(from(config).train_flops_per_token(262144) / 1e9, 2225.9, 0.05);
}

TEST(TrainFlops, CountsDenseAndSharedFfn) {
  const ModelSpec m = tiny_model();  // 3 layers, layer 0 dense
  ModelSpec plain = m;
  plain.shared_intermediate_size = 0;
  EXPECT_DOUBLE_EQ(m.train_flops_per_token(7) - plain.train_flops_per_token(7), 6.0 * 12 * 3 * 5 * 2);
  plain.intermediate_size = 0;
  EXPECT_DOUBLE_EQ(m.train_flops_per_token(7) - plain.train_flops_per_token(7), 6.0 * 12 * 3 * (5 * 2 + 20));
}

TEST(NumParameters, ReleasedModels) {
  EXPECT_EQ(from(qwen3_30b()).num_parameters(), 30532122624);
  EXPECT_EQ(from(qwen3_30b()).num_active_parameters(), 3353032704);
  EXPECT_EQ(from({{"model_type", "mixtral"}}).num_parameters(), 46702792704);
  EXPECT_EQ(from({{"model_type", "mixtral"}}).num_active_parameters(), 12879925248);
  EXPECT_EQ(from({{"model_type", "deepseek_v3"}}).num_parameters(), 671026404352);
  // A layer like the others with experts, the projection and three norms; embedding and head
  // are the model's.
  EXPECT_EQ(from({{"model_type", "deepseek_v3"}, {"num_mtp_layers", 1}}).num_parameters(),
            671026404352 + 11507286016 + 2 * 7168 * 7168 + 3 * 7168);
}

TEST(NumParameters, CountEachTensorOfATinyModel) {
  ModelSpec m = tiny_model();
  // embedding and head, final norm; per layer q, k, v, o, norms of heads and of the layer.
  const int64_t base = 2 * 11 * 12 + 12 + 3 * (12 * (8 + 4 + 4 + 8) + 2 * 4 + 2 * 12);
  const int64_t dense = 3 * 12 * 20, moe = 3 * 12 + 3 * 12 * 5 + 12;  // router, shared expert and its gate
  EXPECT_EQ(m.num_parameters(), base + dense + 2 * (moe + 3 * 3 * 12 * 6));
  EXPECT_EQ(m.num_active_parameters(), base + dense + 2 * (moe + 2 * 3 * 12 * 6));
  m.tie_word_embeddings = true;
  EXPECT_EQ(m.num_parameters(), base + dense + 2 * (moe + 3 * 3 * 12 * 6) - 11 * 12);
  m.tie_word_embeddings = false;
  m.qkv_bias = true;
  m.qk_norm = QkNorm::whole;  // instead of 2 * 4 a layer
  EXPECT_EQ(m.num_parameters(), base + dense + 2 * (moe + 3 * 3 * 12 * 6) + 3 * (8 + 4 + 4 + 8 + 4 - 8));
}

// The biases counted here are those of the two down projections and of o. FLOPs count no biases.
TEST(NumParameters, BiasesOfAttention) {
  for (const char* family : {"llama", "qwen3", "qwen3_moe", "olmoe"}) {
    const ModelSpec plain = from({{"model_type", family}}),
                    with = from({{"model_type", family}, {"attention_bias", true}});
    EXPECT_TRUE(with.qkv_bias && with.o_bias) << family;
    const int64_t each = plain.q_size() + 2 * plain.kv_size() + plain.hidden_size;
    EXPECT_EQ(with.num_parameters() - plain.num_parameters(), plain.num_layers * each) << family;
    EXPECT_DOUBLE_EQ(with.train_flops_per_token(7), plain.train_flops_per_token(7)) << family;
  }
  const json with_latent = {{"model_type", "deepseek_v3"}, {"num_nextn_predict_layers", 1}};
  json biased = with_latent;
  biased["attention_bias"] = true;
  EXPECT_FALSE(from(biased).qkv_bias);
  EXPECT_EQ(from(biased).num_parameters() - from(with_latent).num_parameters(), 62 * (1536 + 512 + 64 + 7168));
  EXPECT_DOUBLE_EQ(from(biased).train_flops_per_token(7), from(with_latent).train_flops_per_token(7));
  biased["q_lora_rank"] = nullptr;
  EXPECT_NO_THROW(from(biased).check());
}

TEST(ModelCheck, TinyModelPasses) { EXPECT_NO_THROW(tiny_model().check()); }

struct Broken {
  const char* text;
  void (*change)(ModelSpec&);
};

TEST(ModelCheck, NamesWhatIsBroken) {
  const Broken cases[] = {
      {"vocab_size must be from 1 to 1000000000; got 0", [](ModelSpec& m) { m.vocab_size = 0; }},
      {"hidden_size must be from 1 to 1000000000; got -4", [](ModelSpec& m) { m.hidden_size = -4; }},
      {"num_attention_heads must be divisible by num_key_value_heads; got 2 and 3",
       [](ModelSpec& m) { m.num_kv_heads = 3; }},
      {"head_dim must be even, RoPE rotates halves; got 5", [](ModelSpec& m) { m.head_dim = 5; }},
      {"rms_norm_eps must be a finite number above 0, from 1e-37 to 1e+37; got nan",
       [](ModelSpec& m) { m.rms_norm_eps = NAN; }},
      {"moe_layers must have an entry for each of the 3 layers; got 1", [](ModelSpec& m) { m.moe_layers = {true}; }},
      {"2 layers are MoE layers but num_experts is 0", [](ModelSpec& m) { m.num_experts = 0; }},
      {"intermediate_size must be from 1", [](ModelSpec& m) { m.intermediate_size = 0; }},
      {"moe_intermediate_size must be from 1", [](ModelSpec& m) { m.moe_intermediate_size = 0; }},
      {"num_experts_per_tok must be from 1 to num_experts = 3; got 4", [](ModelSpec& m) { m.top_k = 4; }},
      {"shared_expert_gate needs a shared expert", [](ModelSpec& m) { m.shared_intermediate_size = 0; }},
      {"num_experts must be divisible by n_group; got 3 and 2", [](ModelSpec& m) { m.n_group = 2; }},
      {"topk_group must be from 1 to n_group = 3; got 4", [](ModelSpec& m) { m.n_group = 3, m.topk_group = 4; }},
      {"at most the 1 experts of topk_group groups; got 2", [](ModelSpec& m) { m.n_group = 3; }},
      {"divisible by topk_group when group_score is \"sum_of_top\"; got 2 and 3",
       [](ModelSpec& m) { m.n_group = m.topk_group = 3; }},
      {"each of the n_group = 3 groups must have two experts "
       "when the sum of its best two scores it; got num_experts = 3",
       [](ModelSpec& m) {
         m.n_group = m.topk_group = 3;
         m.group_score = GroupScore::sum_of_two;
       }},
      {"qk_nope_head_dim must be from 1 to 1000000000; got 0",
       [](ModelSpec& m) { m.kv_lora_rank = 4, m.qk_rope_head_dim = m.head_dim; }},
      {"qk_rope_head_dim must be even, RoPE rotates pairs; got 3",
       [](ModelSpec& m) { m.kv_lora_rank = 4, m.qk_rope_head_dim = 3, m.v_head_dim = 2; }},
      {"num_key_value_heads must be num_attention_heads = 2 with latent attention; got 1",
       [](ModelSpec& m) { m.kv_lora_rank = 4, m.qk_rope_head_dim = 2, m.v_head_dim = 2; }},
      {"latent attention (kv_lora_rank above 0) has no qkv_bias, qk_norm, clip_qkv, sliding_window or attention_sinks",
       [](ModelSpec& m) { m.kv_lora_rank = 4, m.qk_rope_head_dim = 2, m.v_head_dim = 2, m.num_kv_heads = 2; }},
      {"a bias on o goes with those on q, k and v (attention_bias); got it without qkv_bias",
       [](ModelSpec& m) { m.o_bias = true; }},
      {"clip_qkv goes with qk_norm false or \"whole\"; got true, a norm of each head",
       [](ModelSpec& m) { m.clip_qkv = 8; }},
      {"clip_qkv must be a finite number of at least 0: 0, or from 1e-37 to 1e+37; got -8",
       [](ModelSpec& m) { m.qk_norm = QkNorm::none, m.clip_qkv = -8; }},
      {"model_type \"llama\" cannot have clip_qkv = 8.0 (it is null); use model_type \"moebius\"",
       [](ModelSpec& m) {
         m = from({{"model_type", "llama"}}), m.clip_qkv = 8;
       }},
      {"layer_types must give some of the 3 layers the sliding_window and others none; got 3 of 3 and a window of 5",
       [](ModelSpec& m) {
         m.sliding_window = 5, m.sliding_layers = {true, true, true};
       }},
      {"got 1 of 3 and a window of 0",
       [](ModelSpec& m) {
         m.sliding_layers = {true, false, false};
       }},
      {"swiglu_limit and mlp_bias are of routed experts, so every layer must have only those; got 2 MoE layers of 3",
       [](ModelSpec& m) { m.swiglu_limit = 7; }},
      {"model_type \"qwen3_moe\" cannot have attention_sinks = true (it is false); use model_type \"moebius\"",
       [](ModelSpec& m) { m = from(qwen3_30b()), m.attention_sinks = true; }},
      {"at most 1048576 experts are possible in all layers; got num_experts = 1000000 and num_hidden_layers = 3",
       [](ModelSpec& m) { m.num_experts = 1000000; }},
      {"at most 1e+15 parameters are possible; got about",
       [](ModelSpec& m) { m.vocab_size = m.hidden_size = 1'000'000'000; }},
      {"model_type must be one of \"deepseek_v2\", ", [](ModelSpec& m) { m.family = "gpt2"; }},
      {"model_type \"qwen3_moe\" cannot have shared_expert_gate = true (it is false); use model_type \"moebius\"",
       [](ModelSpec& m) { m.family = "qwen3_moe"; }},
      {"model_type \"mixtral\" cannot have intermediate_size = 8 (it is 0)",
       [](ModelSpec& m) {
         m = from({{"model_type", "mixtral"}, {"num_hidden_layers", 2}});
         m.moe_layers[1] = false;
         m.intermediate_size = 8;
       }},
  };
  for (const Broken& broken : cases) {
    ModelSpec m = tiny_model();
    broken.change(m);
    EXPECT_THAT(error_text(ErrorKind::usage, [&] { m.check(); }), HasSubstr(broken.text));
  }
}

}  // namespace
}  // namespace moebius
