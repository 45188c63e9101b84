// Parameter names: Moebius' own (canonical) ones and those of Hugging Face checkpoints.
//
// Canonical names are spelt as qwen3_moe spells them:
//   model.embed_tokens.weight  model.norm.weight  lm_head.weight
//   model.layers.{i}.input_layernorm.weight            model.layers.{i}.post_attention_layernorm.weight
//   model.layers.{i}.self_attn.{q,k,v,o}_proj.{weight,bias}   model.layers.{i}.self_attn.{q,k}_norm.weight
//   model.layers.{i}.self_attn.sinks
//   model.layers.{i}.self_attn.{q_a_proj,q_b_proj,kv_a_proj_with_mqa,kv_b_proj,q_a_layernorm,kv_a_layernorm}.weight
//                                                      latent attention
//   model.layers.{i}.mlp.{gate,up,down}_proj.weight    a dense layer
//   model.layers.{i}.mlp.gate.{weight,bias}            the router of a MoE layer; also mlp.gate.e_score_correction_bias
//   model.layers.{i}.mlp.experts.{e}.{gate,up,down}_proj.{weight,bias}
//   model.layers.{i}.mlp.shared_experts.{gate,up,down}_proj.weight   model.layers.{i}.mlp.shared_expert_gate.weight
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moebius {

// The spellings there are: our own is also that of deepseek_v2 and _v3, llama, mistral, olmoe, qwen2,
// qwen3 and qwen3_moe.
// gpt_oss has mlp.router for mlp.gate, and no tensors of single experts (hub/fused_experts.h).
enum class HfFamily : uint8_t { canonical, mixtral, qwen2_moe, gpt_oss };

// Of config.json's model_type; Error{input} for a model that is not of Hugging Face, with the list.
HfFamily hf_family(std::string_view model_type);

// The name in the family's own checkpoints (of the tensor that an expert's is in, where they are one), and back. Names
// that the family spells as we do pass through unchanged, also ones that nobody knows: whether a tensor belongs to the
// model is for whoever counts them to say.
std::string hf_name(HfFamily family, std::string_view canonical);
std::string canonical_name(HfFamily family, std::string_view hf);

enum class ExpertProjection : uint8_t { gate, up, down };

// "{prefix}mlp.experts.{expert}.{projection}_proj.weight", or .bias, where prefix is "model.layers.{i}."
struct ExpertName {
  std::string prefix;
  int64_t expert = 0;
  ExpertProjection projection = ExpertProjection::gate;
  bool is_bias = false;
};
std::optional<ExpertName> parse_expert_name(std::string_view canonical);  // nothing for other tensors
// The tensor of all experts that it is in where they are one: "{prefix}mlp.experts.gate_up_proj", "down_proj", and the
// same with "_bias".
std::string fused_name(const ExpertName& expert);

}  // namespace moebius
