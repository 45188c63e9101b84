// What the model computes: shapes and maths, nothing about how it is trained or laid out.
// Read from a Hugging Face config.json (v4 and v5 spellings) or from the same keys inline in a recipe's [model].
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "config/json_object.h"

namespace moebius {

// RMSNorm on q and k before RoPE: of each head with one weight of head_dim (Qwen3), or of all heads together with a
// weight of the projection's width (OLMoE).
enum class QkNorm { none, per_head, whole };
enum class ScoreFunction { softmax, sigmoid };
// How a group of experts is scored in group-limited routing: its best expert (DeepSeek-V2), the sum of its best two
// (DeepSeek-V3) or of its best top_k / topk_group (Megatron).
enum class GroupScore { max, sum_of_two, sum_of_top };

// How rotary frequencies are stretched for contexts longer than those of pre-training; values of the keys of
// rope_scaling. The formulas are in model/attention/rope_frequencies.h.
enum class RopeType { plain, linear, llama3, yarn };
struct RopeScaling {
  RopeType type = RopeType::plain;
  double factor = 1.0;
  int64_t original_positions = 0;                        // original_max_position_embeddings; llama3, yarn
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  bool truncate = true;                                  // yarn: the range of dims ends at whole numbers
  double attention_factor = 0.0;                         // yarn: of cosines and sines; 0: from the factor and mscales
  double mscale = 0.0, mscale_all_dim = 0.0;             // yarn; 0: none
  bool operator==(const RopeScaling&) const = default;
};

struct ModelSpec {
  std::string family = "moebius";  // model_type: "moebius" (any combination), "qwen3_moe", "mixtral", ...

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;         // num_hidden_layers
  int64_t num_heads = 0;          // num_attention_heads
  int64_t num_kv_heads = 0;       // num_key_value_heads
  int64_t head_dim = 0;           // of q and k; with latent attention qk_nope_head_dim + qk_rope_head_dim
  int64_t intermediate_size = 0;  // FFN width of dense layers; 0 when there are none (always in mixtral)
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool qkv_bias = false;  // on the q, k and v projections
  bool o_bias = false;    // and on that of o; with latent attention on q_a, kv_a and o
  QkNorm qk_norm = QkNorm::none;
  double clip_qkv = 0;  // q (normed), k (normed) and v are at most this far from 0; 0: as far as they are (OLMoE)
  bool tie_word_embeddings = false;
  int64_t sliding_window = 0;        // keys [i - window + 1, i]; 0: all
  std::vector<bool> sliding_layers;  // some of the layers: those that the window is of; empty: it is of all
  bool attention_sinks = false;      // one more logit per head in attention's softmax, which has no value
  double initializer_range = 0.02;

  // Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), when kv_lora_rank is
  // above 0: keys and values come from one latent vector a token, and qk_rope_head_dim
  // of the head_dim columns of q and k rotate, a k of one head for all.
  int64_t q_lora_rank = 0;  // 0: one projection makes q
  int64_t kv_lora_rank = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool rope_interleave = false;  // pairs (2i, 2i + 1) rotate, not (i, i + d/2)

  // Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the layers, each of them a norm
  // pair, a projection and one more layer like the last; num_nextn_predict_layers. model/layers/mtp.h
  int64_t num_mtp_layers = 0;

  // MoE. moe_layers[i] says whether layer i is an MoE layer; without experts none is.
  std::vector<bool> moe_layers;
  int64_t num_experts = 0;
  int64_t top_k = 0;  // num_experts_per_tok
  int64_t moe_intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // 0: no shared expert
  bool shared_expert_gate = false;       // y += sigmoid(x w_g) * shared(x), Qwen2-MoE
  ScoreFunction score = ScoreFunction::softmax;
  // Weights are divided by their sum over the chosen k ("softmax after top-k" is softmax with this).
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1.0;
  int64_t n_group = 1;  // groups of experts; topk_group of them are kept per token
  int64_t topk_group = 1;
  GroupScore group_score = GroupScore::sum_of_top;
  bool expert_bias = false;       // a correction bias is added to the scores for the choice only
  bool router_bias = false;       // on the router's logits
  bool expert_proj_bias = false;  // on gate, up and down of the routed experts
  // Of routed experts; 0: silu(gate) up. Else the gate is at most this, up within this of 0, and the product is
  // gate sigmoid(1.702 gate) (up + 1)  (gpt-oss, arXiv 2508.10925).
  double swiglu_limit = 0;

  JsonObject source;  // the config.json it came from, unknown keys included, for export; none of a recipe's own keys

  bool is_latent() const { return kv_lora_rank > 0; }
  int64_t window_of(int64_t layer) const {  // as is_moe_layer
    return sliding_layers.empty() || sliding_layers[std::min(layer, num_layers - 1)] ? sliding_window : 0;
  }
  int64_t qk_nope_head_dim() const { return head_dim - qk_rope_head_dim; }
  int64_t rope_dim() const { return is_latent() ? qk_rope_head_dim : head_dim; }
  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t num_moe_layers() const;          // of the num_layers
  bool is_moe_layer(int64_t layer) const;  // the modules' layers follow the others, and are like the last
  int64_t num_layers_and_mtp() const { return num_layers + num_mtp_layers; }
  int64_t num_parameters() const;  // every trained element once (tied embeddings once); expert_bias is state, not one
  int64_t num_active_parameters() const;  // those one token touches: top_k experts, shared, and the dense rest

  // Model FLOPs of one training token at a sequence length: forward, input and weight gradients; attention at the
  // causal half; the router, norms, embedding look-up and recompute not counted (Megatron's convention).
  double train_flops_per_token(int64_t seq_len) const;

  // Error{usage}: every shape positive, divisibility, top_k <= experts, groups, ..., and that the keys of this family
  // can say what this model is (a "qwen3_moe" has no shared expert).
  void check() const;
  bool operator==(const ModelSpec&) const = default;
};

// The model types that Moebius computes, by name.
std::vector<std::string> model_families();

// Error{input} naming the key when the config is not a model that Moebius computes. who names the file for messages.
// Keys that are missing take the defaults of the family's config class in transformers; "moebius" has no default
// shapes. MoE layers: i is one iff it has experts and every pattern that is given agrees: i >= first_k_dense_replace,
// i % moe_layer_freq == 0 (or moe_layer_freq[i]), (i + 1) % decoder_sparse_step == 0, i not in mlp_only_layers.
// Keys of training (router_aux_loss_coef, router_jitter_noise, ...) are kept in source and have no effect: see [moe].
ModelSpec model_spec_from_hf(const nlohmann::json& config, const std::string& who);
// The config.json of a model: source with the keys above written over it, v4 spelling.
nlohmann::json hf_from_model_spec(const ModelSpec& spec);

}  // namespace moebius
