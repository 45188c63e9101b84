// Parameter names: Moebius' own (canonical) ones and those of Hugging Face checkpoints.
//
// Canonical names have the spelling of qwen3_moe:
//   model.embed_tokens.weight  model.norm.weight  lm_head.weight
//   model.layers.{i}.input_layernorm.weight
//   model.layers.{i}.post_attention_layernorm.weight
//   model.layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}
//   model.layers.{i}.self_attn.{q,k}_norm.weight
//   model.layers.{i}.self_attn.sinks
//   model.layers.{i}.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,q_a_layernorm,kv_a_layernorm}.weight
//                                                      latent attention
//   model.layers.{i}.mlp.{gate,up,down}_proj.weight    a dense layer
//   model.layers.{i}.mlp.gate.{weight,bias}            the router of a MoE layer; also
//   mlp.gate.e_score_correction_bias
//   model.layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.{weight,bias}
//   model.layers.{i}.mlp.shared_experts.{gate,up,down}_proj.weight
//   model.layers.{i}.mlp.shared_expert_gate.weight
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moebius {

// The spellings of names in checkpoints. Canonical names are those of deepseek_v2 and _v3, llama,
// mistral, olmoe, qwen2, qwen3 and qwen3_moe too.
// gpt_oss has mlp.router for mlp.gate, and no tensors of single experts (hub/fused_experts.h).
enum class HfFamily : uint8_t { canonical, mixtral, qwen2_moe, gpt_oss };

// Returns the family of a model_type in config.json. Throws Error{input} that lists the families,
// for any other type.
HfFamily hf_family(std::string_view model_type);

// These translate canonical names to those in the family's checkpoints, and back. An expert's
// tensor that is stored fused has the name of the fused tensor.
// Names with the same spelling in both pass through unchanged, and so do unknown names. The caller
// decides whether a tensor belongs to the model.
std::string hf_name(HfFamily family, std::string_view canonical);
std::string canonical_name(HfFamily family, std::string_view hf);

enum class ExpertProjection : uint8_t { gate, up, down };

// An expert's tensor is "{prefix}mlp.experts.{expert}.{projection}_proj.weight", or .bias, where
// prefix is "model.layers.{i}."
struct ExpertName {
  std::string prefix;
  int64_t expert = 0;
  ExpertProjection projection = ExpertProjection::gate;
  bool is_bias = false;
};
std::optional<ExpertName> parse_expert_name(std::string_view canonical);  // nothing for other tensors
// Returns the name of the fused tensor that holds this expert's:
// "{prefix}mlp.experts.gate_up_proj", or "down_proj", or one of these with "_bias".
std::string fused_name(const ExpertName& expert);

}  // namespace moebius
