#include "config/hf/families.h"

#include <algorithm>

namespace moebius {

namespace {

ModelSpec dense_defaults(ModelSpec differing) {
  differing.num_layers = 32;
  differing.num_heads = 32;
  differing.hidden_size = 4096;
  return differing;
}

ModelSpec llama() {
  return dense_defaults({.vocab_size = 32000, .intermediate_size = 11008, .max_position_embeddings = 2048});
}

ModelSpec mistral() {
  return dense_defaults({.vocab_size = 32000,
                         .num_kv_heads = 8,
                         .intermediate_size = 14336,
                         .max_position_embeddings = 131072,
                         .sliding_window = 4096});
}

ModelSpec qwen2() {
  return dense_defaults({.vocab_size = 151936,
                         .num_kv_heads = 32,
                         .intermediate_size = 22016,
                         .max_position_embeddings = 32768,
                         .qkv_bias = true,
                         .sliding_window = 4096});
}

ModelSpec qwen3() {
  ModelSpec m = qwen2();
  m.head_dim = 128;
  m.qkv_bias = false;
  m.qk_norm = QkNorm::per_head;
  return m;
}

ModelSpec mixtral() {
  ModelSpec m = dense_defaults({.vocab_size = 32000, .num_kv_heads = 8, .max_position_embeddings = 131072});
  m.rms_norm_eps = 1e-5;
  m.rope_theta = 1e6;
  m.num_experts = 8;
  m.top_k = 2;
  m.moe_intermediate_size = 14336;
  m.norm_topk_prob = true;
  return m;
}

ModelSpec qwen2_moe() {
  return {.vocab_size = 151936,
          .hidden_size = 2048,
          .num_layers = 24,
          .num_heads = 16,
          .num_kv_heads = 16,
          .intermediate_size = 5632,
          .max_position_embeddings = 32768,
          .qkv_bias = true,
          .sliding_window = 4096,
          .num_experts = 60,
          .top_k = 4,
          .moe_intermediate_size = 1408,
          .shared_intermediate_size = 5632,
          .shared_expert_gate = true};
}

ModelSpec qwen3_moe() {
  return {.vocab_size = 151936,
          .hidden_size = 2048,
          .num_layers = 24,
          .num_heads = 32,
          .num_kv_heads = 4,
          .intermediate_size = 6144,
          .max_position_embeddings = 32768,
          .qk_norm = QkNorm::per_head,
          .sliding_window = 4096,
          .num_experts = 128,
          .top_k = 8,
          .moe_intermediate_size = 768};
}

ModelSpec olmoe() {
  return {.vocab_size = 50304,
          .hidden_size = 2048,
          .num_layers = 16,
          .num_heads = 16,
          .max_position_embeddings = 4096,
          .rms_norm_eps = 1e-5,
          .qk_norm = QkNorm::whole,
          .num_experts = 64,
          .top_k = 8,
          .moe_intermediate_size = 2048};
}

ModelSpec deepseek_v2() {
  ModelSpec m = dense_defaults({.vocab_size = 102400, .intermediate_size = 11008, .max_position_embeddings = 2048});
  m.q_lora_rank = 1536;
  m.kv_lora_rank = 512;
  m.head_dim = 128 + 64;
  m.qk_rope_head_dim = 64;
  m.v_head_dim = 128;
  m.rope_interleave = true;
  m.num_experts = 64;
  m.moe_intermediate_size = 1407;
  m.shared_intermediate_size = 2 * 1407;
  m.group_score = GroupScore::max;
  return m;
}

ModelSpec deepseek_v3() {
  return {.vocab_size = 129280,
          .hidden_size = 7168,
          .num_layers = 61,
          .num_heads = 128,
          .head_dim = 128 + 64,
          .intermediate_size = 18432,
          .max_position_embeddings = 4096,
          .q_lora_rank = 1536,
          .kv_lora_rank = 512,
          .qk_rope_head_dim = 64,
          .v_head_dim = 128,
          .rope_interleave = true,
          .num_experts = 256,
          .top_k = 8,
          .moe_intermediate_size = 2048,
          .shared_intermediate_size = 2048,
          .score = ScoreFunction::sigmoid,
          .norm_topk_prob = true,
          .routed_scaling_factor = 2.5,
          .n_group = 8,
          .topk_group = 4,
          .group_score = GroupScore::sum_of_two,
          .expert_bias = true};
}

ModelSpec gpt_oss() {
  return {.vocab_size = 201088,
          .hidden_size = 2880,
          .num_layers = 36,
          .num_heads = 64,
          .num_kv_heads = 8,
          .head_dim = 64,
          .max_position_embeddings = 131072,
          .rms_norm_eps = 1e-5,
          .rope_theta = 150000.0,
          .rope_scaling = {.type = RopeType::yarn, .factor = 32, .original_positions = 4096, .truncate = false},
          .qkv_bias = true,
          .o_bias = true,
          .sliding_window = 128,
          .attention_sinks = true,
          .num_experts = 128,
          .top_k = 4,
          .moe_intermediate_size = 2880,
          .norm_topk_prob = true,  // softmax over the chosen logits
          .router_bias = true,
          .expert_proj_bias = true,
          .swiglu_limit = 7};
}

std::vector<ModelFamily> make_families() {
  return {{"deepseek_v2", "DeepseekV2ForCausalLM", kDeepseekV2, deepseek_v2()},
          {"deepseek_v3", "DeepseekV3ForCausalLM", kDeepseekV3, deepseek_v3()},
          {"gpt_oss", "GptOssForCausalLM", kGptOss, gpt_oss()},
          {"llama", "LlamaForCausalLM", kLlama, llama()},
          {"mistral", "MistralForCausalLM", kMistral, mistral()},
          {"mixtral", "MixtralForCausalLM", kMixtral, mixtral()},
          {"moebius", "", kMoebius, {.top_k = 1}},  // no shapes: they must be given
          {"olmoe", "OlmoeForCausalLM", kOlmoe, olmoe()},
          {"qwen2", "Qwen2ForCausalLM", kQwen2, qwen2()},
          {"qwen2_moe", "Qwen2MoeForCausalLM", kQwen2Moe, qwen2_moe()},
          {"qwen3", "Qwen3ForCausalLM", kQwen3, qwen3()},
          {"qwen3_moe", "Qwen3MoeForCausalLM", kQwen3Moe, qwen3_moe()}};
}

const std::vector<ModelFamily>& families() {
  static const std::vector<ModelFamily> all = make_families();
  return all;
}

}  // namespace

std::vector<std::string> model_families() {
  std::vector<std::string> names;
  for (const ModelFamily& family : families()) names.push_back(family.name);
  return names;
}

const ModelFamily* find_family(std::string_view model_type) {
  const auto& all = families();
  const auto found = std::find_if(all.begin(), all.end(), [&](const ModelFamily& f) { return f.name == model_type; });
  return found == all.end() ? nullptr : &*found;
}

unsigned family_bit(std::string_view model_type) {
  const ModelFamily* family = find_family(model_type);
  return family ? family->bit : 0;
}

}  // namespace moebius
