// Writes the keys of a config.json from a ModelSpec, in v4 spelling.
#include <fmt/format.h>

#include <algorithm>

#include "config/hf/config.h"
#include "config/hf/keys.h"
#include "config/hf/rope.h"

namespace moebius {

using nlohmann::json;

namespace {

// 1 if every layer is an MoE layer or none has experts; else a list with 0 or 1 for each layer.
json layer_frequency(const ModelSpec& m) {
  if (m.num_moe_layers() == (m.num_experts > 0 ? m.num_layers : 0)) return 1;
  json list = json::array();
  for (const bool moe : m.moe_layers) list.push_back(moe ? 1 : 0);
  return list;
}

json dense_layers(const ModelSpec& m) {
  json list = json::array();
  for (int64_t i = 0; i < static_cast<int64_t>(m.moe_layers.size()); ++i) {
    if (m.num_experts > 0 && !m.moe_layers[i]) list.push_back(i);
  }
  return list;
}

json shared_values(const ModelSpec& m) {
  return {{"model_type", m.family},
          {"vocab_size", m.vocab_size},
          {"hidden_size", m.hidden_size},
          {"num_hidden_layers", m.num_layers},
          {"num_attention_heads", m.num_heads},
          {"num_key_value_heads", m.num_kv_heads},
          {"head_dim", m.head_dim},
          {"intermediate_size", m.intermediate_size},
          {"max_position_embeddings", m.max_position_embeddings},
          {"rms_norm_eps", m.rms_norm_eps},
          {"rope_theta", m.rope_theta},
          {"rope_scaling", rope_scaling_value(m)},
          {"tie_word_embeddings", m.tie_word_embeddings},
          {"sliding_window", m.sliding_window > 0 || m.family == "moebius" ? json(m.sliding_window) : json()},
          {"initializer_range", m.initializer_range},
          {"hidden_act", "silu"},
          {"num_experts_per_tok", m.top_k}};
}

json layer_types(const ModelSpec& m) {
  json types = json::array();
  for (int64_t i = 0; i < m.num_layers; ++i)
    types.push_back(m.window_of(i) > 0 ? "sliding_attention" : "full_attention");
  return types;
}

json latent_values(const ModelSpec& m) {
  return {{"q_lora_rank", m.q_lora_rank > 0 ? json(m.q_lora_rank) : json()},
          {"kv_lora_rank", m.kv_lora_rank},
          {"qk_nope_head_dim", m.qk_nope_head_dim()},
          {"qk_rope_head_dim", m.qk_rope_head_dim},
          {"v_head_dim", m.v_head_dim},
          {"rope_interleave", m.rope_interleave}};
}

const char* group_score_name(GroupScore score) {
  switch (score) {
    case GroupScore::max:
      return "max";
    case GroupScore::sum_of_two:
      return "sum_of_two";
    case GroupScore::sum_of_top:
      return "sum_of_top";
  }
  MOEBIUS_ASSERT(false);
  return "";
}

const char* score_name(ScoreFunction score) {
  switch (score) {
    case ScoreFunction::softmax:
      return "softmax";
    case ScoreFunction::sigmoid:
      return "sigmoid";
  }
  MOEBIUS_ASSERT(false);
  return "";
}

// Returns the DeepSeek keys that qwen and moebius models do not share.
json deepseek_values(const ModelSpec& m) {
  json values = latent_values(m);
  const char* by_group = m.n_group > 1 ? "group_limited_greedy" : "greedy";
  values.update(
      {{"n_routed_experts", m.num_experts},
       {"n_shared_experts", m.shared_intermediate_size / std::max<int64_t>(m.moe_intermediate_size, 1)},
       {"scoring_func", score_name(m.score)},
       {"num_nextn_predict_layers", m.num_mtp_layers},
       {"routed_scaling_factor", m.routed_scaling_factor},
       {"n_group", m.n_group},
       {"topk_group", m.topk_group},
       {"topk_method", m.expert_bias ? "noaux_tc" : by_group},
       {"moe_layer_freq", 1},
       {"first_k_dense_replace", std::find(m.moe_layers.begin(), m.moe_layers.end(), true) - m.moe_layers.begin()}});
  return values;
}

// Keys of the families of the hub; each family writes those that it has.
json hub_values(const ModelSpec& m) {
  const unsigned family = family_bit(m.family);
  json values = {{"qkv_bias", m.qkv_bias},
                 {"attention_bias", m.o_bias},
                 {"mlp_bias", false},
                 {"clip_qkv", m.clip_qkv > 0 ? json(m.clip_qkv) : json()},
                 {"use_sliding_window", m.sliding_window > 0},
                 {family & (kMixtral | kGptOss) ? "num_local_experts" : "num_experts", m.num_experts},
                 {"moe_intermediate_size", m.moe_intermediate_size},
                 {"shared_expert_intermediate_size", m.shared_intermediate_size},
                 {"norm_topk_prob", m.norm_topk_prob},
                 {"swiglu_limit", m.swiglu_limit},
                 {"decoder_sparse_step", 1},
                 {"mlp_only_layers", dense_layers(m)}};
  if (family & kDeepseek) {
    values.erase("num_experts");
    values.update(deepseek_values(m));
  }
  if (family & kExpertWidthIsIntermediate) values["intermediate_size"] = m.moe_intermediate_size;
  const bool by_layer = m.sliding_window > 0 && has_hf_key(m.family, "max_window_layers");
  if (by_layer || family == kGptOss) values["layer_types"] = layer_types(m);
  // Its class in transformers needs a window, though no layer has one.
  if (family == kGptOss && m.sliding_window == 0) {
    const json any = find_family(m.family)->defaults.sliding_window;
    values["sliding_window"] = m.source ? m.source->value("sliding_window", any) : any;
  }
  return values;
}

json qk_norm_value(const ModelSpec& m) {
  return m.qk_norm == QkNorm::whole ? json("whole") : json(m.qk_norm == QkNorm::per_head);
}

json moebius_values(const ModelSpec& m) {
  json values = {{"qkv_bias", m.qkv_bias},
                 {"attention_bias", m.o_bias},
                 {"attention_sinks", m.attention_sinks},
                 {"mlp_bias", m.expert_proj_bias},
                 {"router_bias", m.router_bias},
                 {"swiglu_limit", m.swiglu_limit},
                 {"qk_norm", qk_norm_value(m)},
                 {"num_nextn_predict_layers", m.num_mtp_layers},
                 {"num_experts", m.num_experts},
                 {"moe_intermediate_size", m.moe_intermediate_size},
                 {"shared_expert_intermediate_size", m.shared_intermediate_size},
                 {"shared_expert_gate", m.shared_expert_gate},
                 {"scoring_func", score_name(m.score)},
                 {"norm_topk_prob", m.norm_topk_prob},
                 {"routed_scaling_factor", m.routed_scaling_factor},
                 {"n_group", m.n_group},
                 {"topk_group", m.topk_group},
                 {"group_score", group_score_name(m.group_score)},
                 {"expert_bias", m.expert_bias},
                 {"moe_layer_freq", layer_frequency(m)}};
  if (!m.sliding_layers.empty()) values["layer_types"] = layer_types(m);
  if (m.clip_qkv > 0) values["clip_qkv"] = m.clip_qkv;
  if (m.is_latent()) {
    values.update(latent_values(m));
    values["head_dim"] = json();
  }
  return values;
}

ModelSpec without_source(ModelSpec spec) {
  spec.source = {};
  return spec;
}

}  // namespace

std::vector<std::pair<std::string, json>> hf_values(const ModelSpec& spec) {
  json values = shared_values(spec);
  values.update(spec.family == "moebius" ? moebius_values(spec) : hub_values(spec));
  std::vector<std::pair<std::string, json>> ordered;
  for (const HfKey& key : hf_keys()) {
    if (values.contains(key.name) && has_hf_key(spec.family, key.name))
      ordered.emplace_back(key.name, values.at(key.name));
  }
  return ordered;
}

json hf_from_model_spec(const ModelSpec& spec) {
  json config = spec.source ? *spec.source : json::object();
  if (config.contains("dtype") && !config.contains("torch_dtype")) config["torch_dtype"] = config["dtype"];
  config.erase("dtype");
  for (const HfKey& key : hf_keys()) {
    if (has_hf_key(spec.family, key.name)) config.erase(key.name);  // other spellings would contradict the new values
  }
  for (const HfKey& key : hf_file_keys()) {
    if (key.families & family_bit(spec.family)) config.erase(key.name);
  }
  for (auto& [key, value] : hf_values(spec)) config[key] = std::move(value);
  return config;
}

void check_family(const ModelSpec& spec) {
  MOEBIUS_CHECK(usage, family_bit(spec.family) != 0, "model: model_type must be one of \"{}\"; got \"{}\"",
                fmt::join(model_families(), "\", \""), spec.family);
  ModelSpec wanted = without_source(spec);
  ModelSpec said = without_source(read_hf_config(hf_from_model_spec(wanted), "model", ErrorKind::usage));
  if (said == wanted) return;
  wanted.family = said.family = "moebius";  // the family whose keys can express every difference
  const json a = hf_from_model_spec(wanted), b = hf_from_model_spec(said);
  for (const auto& [key, value] : a.items()) {
    MOEBIUS_CHECK(usage, value == b.value(key, json()),
                  "model: model_type \"{}\" cannot have {} = {} (it is {}); use model_type \"moebius\", which cannot "
                  "be exported to Hugging Face",
                  spec.family, key, shown(value), shown(b.value(key, json())));
  }
  MOEBIUS_ASSERT(false);
}

}  // namespace moebius
