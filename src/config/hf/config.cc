#include "config/hf/config.h"

#include <algorithm>
#include <map>

#include "config/hf/reader.h"
#include "config/hf/rope.h"

namespace moebius {

using nlohmann::json;

namespace {

void require(const HfReader& r, const std::vector<std::string>& keys) {
  std::vector<std::string> missing;
  for (const std::string& key : keys) {
    if (!r.has(key)) missing.push_back(key);
  }
  if (!missing.empty()) r.fail("{} must be given for model_type \"{}\"", fmt::join(missing, ", "), r.family());
}

// Latent attention is that of a family which has it, or of "moebius" if kv_lora_rank is above 0.
void read_latent_attention(const HfReader& r, ModelSpec& m) {
  r.read("kv_lora_rank", m.kv_lora_rank);
  if (!m.is_latent()) return;
  if (r.is_null("q_lora_rank")) m.q_lora_rank = 0;
  r.read("q_lora_rank", m.q_lora_rank);
  const int64_t nope = r.get("qk_nope_head_dim", m.qk_nope_head_dim());
  r.read("qk_rope_head_dim", m.qk_rope_head_dim);
  m.head_dim = nope + m.qk_rope_head_dim;
  if (m.v_head_dim == 0) m.v_head_dim = nope;
  r.read("v_head_dim", m.v_head_dim);
  if (r.is_null("rope_interleave")) m.rope_interleave = false;
  r.read("rope_interleave", m.rope_interleave);
  if (m.num_kv_heads != m.num_heads) {
    r.fail("num_key_value_heads must be num_attention_heads = {} with latent attention; got {}", m.num_heads,
           m.num_kv_heads);
  }
}

// The model has modules of multi-token prediction only if the config gives their number.
// transformers assumes one for deepseek_v3 without it, and does not compute it.
void read_mtp(const HfReader& r, ModelSpec& m) {
  r.read("num_nextn_predict_layers", m.num_mtp_layers);
  const int64_t same = r.get("num_mtp_layers", m.num_mtp_layers);
  if (r.has("num_nextn_predict_layers") && same != m.num_mtp_layers) {
    r.fail("num_nextn_predict_layers = {} and num_mtp_layers = {} contradict each other", m.num_mtp_layers, same);
  }
  m.num_mtp_layers = same;
}

void read_shapes(const HfReader& r, ModelSpec& m) {
  std::vector<std::string> shapes;
  if (m.vocab_size == 0) shapes = {"vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"};
  if (m.max_position_embeddings == 0) shapes.push_back("max_position_embeddings");
  require(r, shapes);
  r.read("vocab_size", m.vocab_size);
  r.read("hidden_size", m.hidden_size);
  r.read("num_hidden_layers", m.num_layers);
  read_mtp(r, m);
  r.read("num_attention_heads", m.num_heads);
  // Null means one key head for each query head; a missing key does not.
  if (m.num_kv_heads == 0 || r.is_null("num_key_value_heads")) m.num_kv_heads = m.num_heads;
  r.read("num_key_value_heads", m.num_kv_heads);
  if (m.head_dim == 0 || r.is_null("head_dim")) m.head_dim = m.hidden_size / m.num_heads;
  r.read("head_dim", m.head_dim);
  read_latent_attention(r, m);
  const bool of_experts = family_bit(m.family) & kExpertWidthIsIntermediate;
  r.read("intermediate_size", of_experts ? m.moe_intermediate_size : m.intermediate_size);
  r.read("max_position_embeddings", m.max_position_embeddings);
}

// layer_types is checked in every family, even if its layers cannot differ or the window is off:
// another program may read it otherwise.
void check_layer_types(const HfReader& r, const ModelSpec& m, const json& config) {
  const auto types = config.find("layer_types");
  if (types == config.end() || types->is_null()) return;
  if (!types->is_array() || static_cast<int64_t>(types->size()) != m.num_layers) {
    r.fail("layer_types must have one entry for each of the {} layers; got {}", m.num_layers,
           types->is_array() ? json(types->size()).dump() : shown(*types));
  }
  for (size_t i = 0; i < types->size(); ++i) {
    const json& type = (*types)[i];
    if (type == "sliding_attention" || type == "full_attention") continue;
    r.fail("layer_types must be \"full_attention\" or \"sliding_attention\"; got {} for layer {}", shown(type), i);
  }
}

// Returns whether layer i attends through the window, by layer_types or max_window_layers.
bool slides(const HfReader& r, const ModelSpec& m, int64_t i) {
  const bool late_by_default = family_bit(m.family) & (kQwen2 | kQwen3);
  if (!r.has("layer_types") && family_bit(m.family) == kGptOss) return i % 2 == 0;
  if (!r.has("layer_types")) return i >= r.get("max_window_layers", int64_t{late_by_default ? 28 : 0});
  return r.get("layer_types", std::vector<std::string>())[i] == "sliding_attention";
}

// Reads which layers have the window. REQUIRES: the model has one.
void read_window_layers(const HfReader& r, ModelSpec& m) {
  for (int64_t i = 0; i < m.num_layers; ++i) m.sliding_layers.push_back(slides(r, m, i));
  const auto sliding = std::count(m.sliding_layers.begin(), m.sliding_layers.end(), true);
  if (family_bit(m.family) == kMistral && sliding < m.num_layers)
    r.fail(
        "layer_types gives {} of {} layers a sliding window; expected all of them for model_type \"mistral\", or a "
        "sliding_window of null, since transformers has the window in all layers",
        sliding, m.num_layers);
  if (sliding == 0) m.sliding_window = 0;
  if (sliding == 0 || sliding == m.num_layers) m.sliding_layers.clear();
}

// In transformers a window of 0 holds no key. Here it means no window, and only "moebius"
// may have it.
void check_window(const HfReader& r, const ModelSpec& m, bool used) {
  const bool of_hub = family_bit(m.family) != kMoebius;
  if (of_hub && used && r.has("sliding_window") && m.sliding_window == 0)
    r.fail("sliding_window must be at least 1, or null for none; got 0");
  if (family_bit(m.family) == kQwen2Moe && used && r.is_null("sliding_window"))
    r.fail("use_sliding_window needs a sliding_window for model_type \"qwen2_moe\"; got null");
  if (used && m.sliding_window > 0) return;
  const auto types = r.get("layer_types", std::vector<std::string>());
  const auto at = std::find(types.begin(), types.end(), "sliding_attention");
  if (at != types.end())
    r.fail("layer_types gives layer {} a sliding window, but the model has none: sliding_window is {}; make them agree",
           at - types.begin(), used ? "not set" : "switched off by use_sliding_window");
}

void read_window(const HfReader& r, ModelSpec& m, const json& config) {
  check_layer_types(r, m, config);
  const unsigned family = family_bit(m.family);
  const bool used = r.get("use_sliding_window", (family & (kMixtral | kMistral | kGptOss | kMoebius)) != 0);
  if (r.is_null("sliding_window")) m.sliding_window = 0;
  r.read("sliding_window", m.sliding_window);
  check_window(r, m, used);
  if (!used) m.sliding_window = 0;
  if (m.sliding_window == 0) return;
  // 4.x and 5.x disagree on which layers of a qwen2_moe slide when its config.json does
  // not list them.
  if (family == kQwen2Moe && !r.has("layer_types")) {
    r.fail("use_sliding_window needs layer_types for model_type \"qwen2_moe\"; give them");
  }
  read_window_layers(r, m);
}

void refuse_unknown_maths(const HfReader& r) {
  const auto act = r.get("hidden_act", std::string("silu"));
  if (act != "silu") r.fail("hidden_act must be \"silu\"; got \"{}\"", act);
  if (family_bit(r.family()) != kMoebius && r.get("mlp_bias", false))
    r.fail("mlp_bias must be false: gate, up and down have no bias here; got true");
  const double dropout = r.get("attention_dropout", 0.0);
  if (dropout != 0.0) r.fail("attention_dropout must be 0: attention drops nothing here; got {}", dropout);
}

// Keys on which DeepSeek's own code and transformers differ, and keys that have one value
// in the family.
void refuse_deepseek_variants(const HfReader& r) {
  const bool v2 = family_bit(r.family()) == kDeepseekV2, v3 = family_bit(r.family()) == kDeepseekV3;
  if (!v2 && !v3) return;
  const auto expect = [&](const char* key, const std::string& expected, const char* why) {
    const json value = r.get(key, json());
    if (!value.is_null() && shown(value) != expected)
      r.fail("{} must be {} for model_type \"{}\"{}; got {}", key, expected, r.family(), why, shown(value));
  };
  expect("moe_layer_freq", "1", "");
  expect("scoring_func", v2 ? "\"softmax\"" : "\"sigmoid\"", "");
  if (v3) return expect("topk_method", "\"noaux_tc\"", "");
  expect("norm_topk_prob", "false", ", whose readers disagree on what it does");
  if (r.get("topk_method", std::string()) == "noaux_tc")
    r.fail("topk_method must be \"greedy\" or \"group_limited_greedy\" for model_type \"deepseek_v2\"");
}

// Some programs compute with this key (transformers since 5.24), and others always with 7.
void refuse_gpt_oss_variants(const HfReader& r, const ModelSpec& m) {
  if (family_bit(m.family) != kGptOss || r.get("swiglu_limit", m.swiglu_limit) == m.swiglu_limit) return;
  r.fail("swiglu_limit must be {} for model_type \"gpt_oss\", whose readers disagree on what it does; got {}",
         m.swiglu_limit, r.get("swiglu_limit", 0.0));
}

void read_attention(const HfReader& r, ModelSpec& m) {
  r.read("qkv_bias", m.qkv_bias);
  r.read("attention_bias", m.o_bias);
  if (r.has("attention_bias") && m.family == "gpt_oss") m.qkv_bias = m.o_bias;
  if (!m.is_latent()) m.qkv_bias = m.qkv_bias || m.o_bias;
  r.read("attention_sinks", m.attention_sinks);
  r.read("clip_qkv", m.clip_qkv);
  const json norm = r.get("qk_norm", json());
  if (norm.is_boolean()) m.qk_norm = norm.get<bool>() ? QkNorm::per_head : QkNorm::none;
  if (norm.is_string()) m.qk_norm = QkNorm::whole;
  if (m.family == "olmoe" && m.q_size() != m.hidden_size) {
    r.fail(
        "head_dim must be hidden_size / num_attention_heads for model_type \"olmoe\", whose q_norm has hidden_size "
        "weights; got {}",
        m.head_dim);
  }
}

int64_t expert_count(const HfReader& r, int64_t fallback) {
  const char* seen = nullptr;
  for (const char* key : {"num_experts", "num_local_experts", "n_routed_experts"}) {
    if (!r.has(key)) continue;
    const int64_t count = r.get(key, fallback);
    if (seen && count != fallback) r.fail("{} = {} and {} = {} contradict each other", seen, fallback, key, count);
    seen = key;
    fallback = count;
  }
  return fallback;
}

void read_shared_expert(const HfReader& r, ModelSpec& m) {
  if (r.has("n_shared_experts") && r.has("shared_expert_intermediate_size")) {
    r.fail("n_shared_experts and shared_expert_intermediate_size both give the shared expert; keep one");
  }
  // The DeepSeek classes give the number of shared experts, and have a default for it.
  const bool counts = family_bit(m.family) & kDeepseek;
  const int64_t number = r.get("n_shared_experts", int64_t{family_bit(m.family) == kDeepseekV2 ? 2 : 1});
  if (counts || r.has("n_shared_experts")) m.shared_intermediate_size = number * m.moe_intermediate_size;
  r.read("shared_expert_intermediate_size", m.shared_intermediate_size);
  r.read("shared_expert_gate", m.shared_expert_gate);
}

// DeepSeek's topk_method. "greedy" ignores groups. "group_limited_greedy" (V2) scores a group by
// its best expert, "noaux_tc" (V3) by the sum of its best two, with a bias for the choice.
void read_topk_method(const HfReader& r, ModelSpec& m) {
  const bool is_v2 = family_bit(m.family) == kDeepseekV2;
  const auto method = r.get("topk_method", std::string(is_v2 ? "greedy" : ""));
  if (method.empty()) return;
  if (r.has("group_score") || r.has("expert_bias")) {
    r.fail("topk_method already determines group_score and expert_bias; keep it or them");
  }
  m.expert_bias = method == "noaux_tc";
  m.group_score = method == "group_limited_greedy" ? GroupScore::max : GroupScore::sum_of_two;
  for (const char* key : {"n_group", "topk_group"}) {  // its class has no default for them
    if (is_v2 && method != "greedy" && !r.has(key)) r.fail("{} must be given for topk_method \"{}\"", key, method);
  }
  if (method == "greedy") m.n_group = m.topk_group = 1;
  if (is_v2 && m.n_group == 1) m.group_score = GroupScore::sum_of_two;  // one group is all experts, whatever its score
}

// Reads a key whose values are names; the table of keys has refused others.
template <class Enum>
void read_named(const HfReader& r, const char* key, const std::map<std::string, Enum>& names, Enum& value) {
  if (r.has(key)) value = names.at(r.get(key, std::string()));
}

void read_router(const HfReader& r, ModelSpec& m) {
  m.num_experts = expert_count(r, m.num_experts);
  r.read("num_experts_per_tok", m.top_k);
  r.read("moe_intermediate_size", m.moe_intermediate_size);
  r.read("norm_topk_prob", m.norm_topk_prob);
  r.read("routed_scaling_factor", m.routed_scaling_factor);
  r.read("n_group", m.n_group);
  r.read("topk_group", m.topk_group);
  r.read("expert_bias", m.expert_bias);
  r.read("router_bias", m.router_bias);
  r.read("mlp_bias", m.expert_proj_bias);
  r.read("swiglu_limit", m.swiglu_limit);
  read_named(r, "scoring_func", {{"softmax", ScoreFunction::softmax}, {"sigmoid", ScoreFunction::sigmoid}}, m.score);
  read_named(r, "group_score",
             {{"max", GroupScore::max}, {"sum_of_two", GroupScore::sum_of_two}, {"sum_of_top", GroupScore::sum_of_top}},
             m.group_score);
  read_topk_method(r, m);
  read_shared_expert(r, m);
}

void read_moe_layers(const HfReader& r, ModelSpec& m) {
  const auto freq = r.get("moe_layer_freq", json(1));
  const auto step = r.get("decoder_sparse_step", int64_t{1});
  const auto first = r.get("first_k_dense_replace", int64_t{family_bit(m.family) == kDeepseekV3 ? 3 : 0});
  const auto dense = r.get("mlp_only_layers", json::array());
  if (freq.is_array() && static_cast<int64_t>(freq.size()) != m.num_layers) {
    r.fail("moe_layer_freq must have one entry for each of the {} layers; got {}", m.num_layers, freq.size());
  }
  m.moe_layers.assign(m.num_layers, false);
  for (int64_t i = 0; i < m.num_layers; ++i) {
    const bool by_freq = freq.is_array() ? freq[i] != 0 : i % freq.get<int64_t>() == 0;
    const bool named_dense = std::find(dense.begin(), dense.end(), json(i)) != dense.end();
    m.moe_layers[i] = m.num_experts > 0 && by_freq && i >= first && (i + 1) % step == 0 && !named_dense;
  }
}

}  // namespace

ModelSpec read_hf_config(const json& config, const std::string& who, ErrorKind kind) {
  const HfReader r(config, who, kind);
  ModelSpec m = find_family(r.family())->defaults;
  m.family = r.family();
  read_shapes(r, m);
  read_window(r, m, config);
  read_rope(r, m);
  refuse_unknown_maths(r);
  refuse_deepseek_variants(r);
  refuse_gpt_oss_variants(r, m);
  r.read("rms_norm_eps", m.rms_norm_eps);
  read_attention(r, m);
  r.read("tie_word_embeddings", m.tie_word_embeddings);
  r.read("initializer_range", m.initializer_range);
  read_router(r, m);
  read_moe_layers(r, m);
  m.source = config;
  return m;
}

ModelSpec model_spec_from_hf(const json& config, const std::string& who) {
  return read_hf_config(config, who, ErrorKind::input);
}

}  // namespace moebius
