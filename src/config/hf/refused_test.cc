// A config.json that Moebius does not compute is an error that names the key.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <initializer_list>

#include "config/hf/testing.h"
#include "config/testing.h"

namespace moebius {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct Refused {
  json more;
  const char* text;
};

// Adds each case to a whole config.json of a model of type "moebius", and expects the error.
void expect_refused(std::initializer_list<Refused> cases) {
  for (const Refused& refused : cases) {
    const json config = with(moebius_config(), refused.more);
    EXPECT_THAT(error_text(ErrorKind::input, [&] { from(config); }), HasSubstr(refused.text));
  }
}

TEST(HfRead, RefusesWhatIsNoObject) {
  EXPECT_THAT(error_text(ErrorKind::input, [] { from(json::array()); }),
              HasSubstr("DIR/config.json: expected a JSON object; got []"));
  EXPECT_THAT(error_text(ErrorKind::input, [] { from(json::object()); }), HasSubstr("got null"));
}

TEST(HfRead, RefusesModelsThatAreNotComputed) {
  expect_refused({
      {{{"model_type", "gpt2"}},
       "DIR/config.json: model_type must be one of \"deepseek_v2\", \"deepseek_v3\", "
       "\"gpt_oss\", \"llama\", \"mistral\", \"mixtral\", \"moebius\", \"olmoe\", "
       "\"qwen2\", \"qwen2_moe\", \"qwen3\", \"qwen3_moe\"; got \"gpt2\""},
      {{{"model_type", 3}}, "\"qwen3_moe\"; got 3"},
      {{{"hidden_act", "gelu"}}, "DIR/config.json: hidden_act must be \"silu\"; got \"gelu\""},
      {{{"clip_qkv", 0.0}}, "clip_qkv must be a finite number above 0, from 1e-37 to 1e+37; got 0.0"},
      {{{"clip_qkv", "x"}}, "clip_qkv must be a finite number above 0, from 1e-37 to 1e+37; got \"x\""},
      {{{"qk_norm", "half"}}, "qk_norm must be true (of each head), false or \"whole\" (of all heads together)"},
      {{{"attention_dropout", 0.1}}, "attention_dropout must be 0: attention drops nothing here; got 0.1"},
      {{{"is_causal", false}}, "is_causal must be true; got false"},
      {{{"is_causal", nullptr}}, "is_causal must be true; got null; give it, or remove the key"},
      {{{"kv_lora_rank", 4}, {"qk_rope_head_dim", 2}, {"num_key_value_heads", 1}},
       "num_key_value_heads must be num_attention_heads = 2 with latent attention; got 1"},
  });
}

TEST(HfRead, RefusesNumbersThatAreNotWholeOrOutOfRange) {
  expect_refused({
      {{{"num_experts_per_tok", nullptr}},
       "num_experts_per_tok must be a whole number from 0 to 1000000000; got null; give it, or remove the key"},
      {{{"n_shared_experts", nullptr}}, "n_shared_experts must be a whole number from 0 to 1000000000; got null"},
      {{{"n_group", 2}, {"topk_group", nullptr}}, "topk_group must be a whole number from 1 to 1000000000; got null"},
      {{{"hidden_size", "big"}}, "hidden_size must be a whole number from 1 to 1000000000; got \"big\""},
      {{{"hidden_size", 12.5}}, "hidden_size must be a whole number from 1 to 1000000000; got 12.5"},
      {{{"vocab_size", nullptr}}, "vocab_size must be a whole number from 1 to 1000000000; got null; give it"},
      {{{"max_position_embeddings", nullptr}}, "max_position_embeddings must be a whole number from 1 to 1000000000"},
      {{{"num_hidden_layers", 1 << 20}}, "num_hidden_layers must be a whole number from 1 to 65536"},
  });
}

TEST(HfRead, RefusesLayersThatAreNotComputed) {
  expect_refused({
      {{{"sliding_window", 5}, {"layer_types", {"full_attention", "sliding_attention"}}},
       "layer_types must have one entry for each of the 4 layers; got 2"},
      {{{"sliding_window", 5}, {"layer_types", {"x", "x", "x", "x"}}},
       "layer_types must be \"full_attention\" or \"sliding_attention\"; got \"x\" for layer 0"},
      {{{"layer_types", 7}}, "layer_types must be a list of strings; got 7"},
      {{{"sliding_window", 0}, {"layer_types", {"x", "x", "x", "x"}}}, "got \"x\" for layer 0"},  // off, and odd
      {{{"sliding_window", 0}, {"layer_types", {"full_attention", "sliding_attention", "x", "x"}}},
       "got \"x\" for layer 2"},
      {{{"layer_types", {"full_attention", "sliding_attention", "full_attention", "full_attention"}}},
       "layer_types gives layer 1 a sliding window, "
       "but the model has none: sliding_window is not set; make them agree"},
      {{{"per_layer_config", {{"0", {{"rms_norm_eps", 0.5}}}}}}, "per_layer_config must be {}; got {\"0\""},
      {{{"moe_layer_freq", {0, 1}}}, "moe_layer_freq must have one entry for each of the 4 layers; got 2"},
      {{{"moe_layer_freq", {0, 2}}}, "moe_layer_freq must be a whole number of at least 1 or a list of 0 and 1"},
      {{{"mlp_only_layers", {0, -1}}}, "mlp_only_layers must be a list of layer numbers; got [0,-1]"},
  });
}

TEST(HfRead, RefusesRopeThatIsNotComputed) {
  expect_refused({
      {{{"rope_scaling", {{"type", "longrope"}, {"factor", 4.0}}}},
       "rope_scaling of type \"longrope\" is not computed; expected \"default\", \"linear\", \"llama3\" or \"yarn\""},
      {{{"rope_parameters", {{"rope_type", "dynamic"}}}}, "rope_parameters of type \"dynamic\" is not computed"},
      {{{"rope_parameters", {{"rope_type", "llama3"}}}},
       "rope_parameters.factor must be given for RoPE of type \"llama3\""},
      {{{"rope_scaling", {{"type", "llama3"}, {"factor", 4}, {"low_freq_factor", 1}}}},
       "rope_scaling.high_freq_factor must be given for RoPE of type \"llama3\""},
      {{{"rope_scaling", {{"type", "llama3"}, {"factor", 4}, {"low_freq_factor", 4}, {"high_freq_factor", 4}}}},
       "rope_scaling.high_freq_factor must be above low_freq_factor = 4; got 4"},
      {{{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"beta_fast", 1}, {"beta_slow", 32}}}},
       "rope_scaling.beta_fast must be above beta_slow = 32; got 1"},
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
      {{{"partial_rotary_factor", 0.5}}, "partial_rotary_factor must be 1; got 0.5"},
      {{{"rope_parameters", {{"partial_rotary_factor", 0.5}}}}, "rope_parameters.partial_rotary_factor must be 1"},
      {{{"rope_parameters", {{"full_attention", json::object()}}}},
       "rope_parameters.full_attention gives RoPE per kind of layer"},
      {{{"rope_parameters", {{"rope_theta", nullptr}}}},
       "rope_parameters.rope_theta must not be null; give it, or remove the key"},
      {{{"rope_scaling", {{"type", "yarn"}, {"factor", 4}, {"original_max_position_embeddings", nullptr}}}},
       "rope_scaling.original_max_position_embeddings must not be null; give it, or remove the key"},
      {{{"rope_parameters", {{"rope_theta", "x"}}}},
       "rope_parameters.rope_theta must be a finite number above 0; got \"x\""},
      {{{"rope_theta", 2.0}, {"rope_parameters", {{"rope_theta", 3.0}}}},
       "rope_theta 2 and rope_parameters.rope_theta 3 contradict"},
  });
}

TEST(HfRead, RefusesRoutersThatAreNotComputed) {
  expect_refused({
      {{{"num_experts", 4}, {"n_routed_experts", 8}}, "num_experts = 4 and n_routed_experts = 8 contradict each other"},
      {{{"n_shared_experts", 1}, {"shared_expert_intermediate_size", 8}},
       "n_shared_experts and shared_expert_intermediate_size both"},
      {{{"topk_method", "noaux_tc"}, {"expert_bias", false}},
       "topk_method already determines group_score and expert_bias; keep it or them"},
      {{{"topk_method", "random"}},
       "topk_method must be \"greedy\" or \"group_limited_greedy\" or \"noaux_tc\"; got \"random\""},
      {{{"scoring_func", "tanh"}}, "scoring_func must be \"softmax\" or \"sigmoid\"; got \"tanh\""},
  });
}

TEST(HfRead, RefusesAFactorOfYarnBelow1) {
  expect_refused({
      {{{"rope_scaling", {{"type", "yarn"}, {"factor", 0.5}}}},
       "rope_scaling.factor must be at least 1 for RoPE of type \"yarn\", which stretches the positions to factor * "
       "original_max_position_embeddings; got 0.5"},
      {{{"max_position_embeddings", 16},
        {"rope_scaling", {{"type", "yarn"}, {"original_max_position_embeddings", 64}}}},
       "rope_scaling has no factor, and RoPE of type \"yarn\" takes max_position_embeddings / "
       "original_max_position_embeddings = 16 / 64 = 0.25, which must be at least 1; correct them, or give the factor"},
  });
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
      {{{"model_type", "gpt_oss"}, {"swiglu_alpha", 1.0}}, "swiglu_alpha must be 1.702; got 1.0"},
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

}  // namespace
}  // namespace moebius
