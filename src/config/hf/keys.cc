#include "config/hf/keys.h"

#include <algorithm>

namespace moebius {

using nlohmann::json;

namespace {

ValueRule integer_list() {
  const ValueRule integer = count_or_zero();
  return {"a list of layer numbers",
          [integer](const json& v) { return v.is_array() && std::all_of(v.begin(), v.end(), integer.accepts); }};
}

ValueRule layer_frequency() {
  const ValueRule every = positive_count(), flag = integer_in(0, 1);
  return {"a whole number of at least 1 or a list of 0 and 1, one per layer", [every, flag](const json& v) {
            return v.is_array() ? std::all_of(v.begin(), v.end(), flag.accepts) : every.accepts(v);
          }};
}

ValueRule text_list() {
  return {"a list of strings", [](const json& v) {
            return v.is_array() && std::all_of(v.begin(), v.end(), [](const json& each) { return each.is_string(); });
          }};
}

ValueRule qk_norm() {
  return {"true (of each head), false or \"whole\" (of all heads together)",
          [](const json& v) { return v.is_boolean() || v == "whole"; }};
}

ValueRule only(const json& value) {
  return {shown(value), [value](const json& v) { return v == value; }};
}

constexpr unsigned kQwenMoe = kQwen2Moe | kQwen3Moe;
// Families whose layers may differ in their window.
constexpr unsigned kWindowByLayer = kQwen2 | kQwen2Moe | kQwen3 | kMoebius;

std::vector<HfKey> make_keys() {
  return {
      {"model_type", one_of(model_families()), kAllFamilies, ""},
      {"vocab_size", positive_count(), kAllFamilies, ""},
      {"hidden_size", positive_count(), kAllFamilies, ""},
      {"num_hidden_layers", integer_in(1, 1 << 16), kAllFamilies, ""},
      {"num_nextn_predict_layers", integer_in(0, 1 << 8), kDeepseekV3 | kMoebius, "", kDeepseekV3},
      {"num_mtp_layers", integer_in(0, 1 << 8), kDeepseekV3 | kMoebius, "num_nextn_predict_layers"},
      {"num_attention_heads", positive_count(), kAllFamilies, ""},
      {"num_key_value_heads", positive_count(), kAllFamilies, "", kAllFamilies},
      {"head_dim", positive_count(), kAllFamilies & ~kDeepseek, "", kAllFamilies},
      {"q_lora_rank", count_or_zero(), kDeepseek | kMoebius, "", kAllFamilies},
      {"kv_lora_rank", count_or_zero(), kDeepseek | kMoebius, ""},
      {"qk_nope_head_dim", positive_count(), kDeepseek | kMoebius, ""},
      {"qk_rope_head_dim", count_or_zero(), kDeepseek | kMoebius, ""},
      {"v_head_dim", count_or_zero(), kDeepseek | kMoebius, ""},
      {"rope_interleave", any_boolean(), kDeepseekV3 | kMoebius, "", kDeepseekV3},
      {"intermediate_size", count_or_zero(), kAllFamilies, ""},
      {"max_position_embeddings", positive_count(), kAllFamilies, ""},
      {"rms_norm_eps", float_above_zero(), kAllFamilies, ""},
      {"rope_theta", number_above(0), kAllFamilies, ""},
      {"rope_scaling", any_table(), kAllFamilies, "", kAllFamilies},
      {"rope_parameters", any_table(), kAllFamilies, "rope_theta", kAllFamilies},
      {"qkv_bias", any_boolean(), kQwen2Moe | kMoebius, ""},
      {"qk_norm", qk_norm(), kMoebius, ""},
      {"tie_word_embeddings", any_boolean(), kAllFamilies, ""},
      {"attention_sinks", any_boolean(), kMoebius, ""},
      {"sliding_window", count_or_zero(), kAllFamilies & ~(kLlama | kOlmoe | kDeepseek), "", kAllFamilies & ~kGptOss},
      {"use_sliding_window", any_boolean(), kWindowByLayer | kQwen3Moe, "sliding_window"},
      {"max_window_layers", count_or_zero(), kWindowByLayer, "sliding_window"},
      {"layer_types", text_list(), kWindowByLayer | kMistral | kGptOss, "", kAllFamilies},
      {"initializer_range", float_or_zero(), kAllFamilies, ""},
      {"hidden_act", any_text(), kAllFamilies, ""},
      {"attention_bias", any_boolean(), kLlama | kQwen3 | kQwen3Moe | kOlmoe | kDeepseek | kGptOss | kMoebius, ""},
      {"mlp_bias", any_boolean(), kLlama | kDeepseekV2 | kMoebius, ""},
      {"clip_qkv", float_above_zero(), kOlmoe | kMoebius, "", kAllFamilies},
      {"attention_dropout", number_at_least(0), kAllFamilies, "", kLlama | kDeepseek},
      {"num_experts", count_or_zero(), kMoeFamilies, ""},
      {"num_local_experts", count_or_zero(), kMoeFamilies, "num_experts"},
      {"n_routed_experts", count_or_zero(), kDeepseek | kMoebius, "num_experts"},
      {"num_experts_per_tok", count_or_zero(), kMoeFamilies, ""},
      {"moe_intermediate_size", count_or_zero(), kQwenMoe | kDeepseek | kMoebius, ""},
      {"shared_expert_intermediate_size", count_or_zero(), kQwen2Moe | kMoebius, ""},
      {"n_shared_experts", count_or_zero(), kDeepseek | kMoebius, "shared_expert_intermediate_size"},
      {"shared_expert_gate", any_boolean(), kMoebius, ""},
      {"scoring_func", one_of({"softmax", "sigmoid"}), kDeepseek | kMoebius, "", kDeepseek},
      {"norm_topk_prob", any_boolean(), kQwenMoe | kOlmoe | kDeepseek | kMoebius, ""},
      {"routed_scaling_factor", float_above_zero(), kDeepseek | kMoebius, ""},
      {"n_group", positive_count(), kDeepseek | kMoebius, "", kDeepseekV2},
      {"topk_group", positive_count(), kDeepseek | kMoebius, "", kDeepseekV2},
      {"group_score", one_of({"max", "sum_of_top", "sum_of_two"}), kMoebius, ""},
      {"topk_method", one_of({"greedy", "group_limited_greedy", "noaux_tc"}), kDeepseek | kMoebius, "group_score",
       kDeepseekV3},
      {"expert_bias", any_boolean(), kMoebius, ""},
      {"router_bias", any_boolean(), kMoebius, ""},
      {"swiglu_limit", float_or_zero(), kGptOss | kMoebius, ""},
      {"moe_layer_freq", layer_frequency(), kDeepseek | kMoebius, "", kDeepseek},
      {"first_k_dense_replace", count_or_zero(), kDeepseek | kMoebius, "moe_layer_freq"},
      {"decoder_sparse_step", positive_count(), kQwenMoe | kMoebius, "moe_layer_freq"},
      {"mlp_only_layers", integer_list(), kQwenMoe | kMoebius, "moe_layer_freq", kQwenMoe},
  };
}

std::vector<HfKey> make_file_keys() {
  return {
      {"is_causal", only(true), kAllFamilies, ""},
      {"per_layer_config", only(json::object()), kAllFamilies, "", kAllFamilies},
      {"partial_rotary_factor", only(1), kAllFamilies, "", kAllFamilies},
      {"original_max_position_embeddings", positive_count(), kAllFamilies, "rope_scaling"},
      {"swiglu_alpha", only(1.702), kGptOss | kMoebius, ""},
  };
}

}  // namespace

const std::vector<HfKey>& hf_file_keys() {
  static const std::vector<HfKey> keys = make_file_keys();
  return keys;
}

const std::vector<HfKey>& hf_keys() {
  static const std::vector<HfKey> keys = make_keys();
  return keys;
}

const HfKey* find_hf_key(std::string_view name) {
  const auto& keys = hf_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [name](const HfKey& key) { return key.name == name; });
  return found == keys.end() ? nullptr : &*found;
}

bool has_hf_key(std::string_view model_type, std::string_view name) {
  const HfKey* key = find_hf_key(name);
  return key && (key->families & family_bit(model_type));
}

}  // namespace moebius
