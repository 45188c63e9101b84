// The model: its shapes and its maths. Training and layout are in other specs.
// The spec is read from a Hugging Face config.json (v4 and v5 spellings), or from the same keys in
// a recipe's [model].
#pragma once

#include <algorithm>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "config/json_object.h"

namespace moebius {

// RMSNorm on q and k before RoPE. per_head: of each head, with one weight of head_dim (Qwen3).
// whole: of all heads together, with a weight of the projection's width (OLMoE).
enum class QkNorm { none, per_head, whole };
enum class ScoreFunction { softmax, sigmoid };
// The score of a group of experts in group-limited routing: its best expert (DeepSeek-V2), the sum
// of its best two (DeepSeek-V3), or the sum of its best top_k / topk_group (Megatron).
enum class GroupScore { max, sum_of_two, sum_of_top };

// Rotary frequencies are stretched for contexts longer than those of pre-training. The members are
// the values of rope_scaling's keys. model/attention/rope_frequencies.h has the formulas.
enum class RopeType { plain, linear, llama3, yarn };
struct RopeScaling {
  RopeType type = RopeType::plain;
  double factor = 1.0;
  int64_t original_positions = 0;                        // original_max_position_embeddings; llama3, yarn
  double low_freq_factor = 1.0, high_freq_factor = 4.0;  // llama3
  double beta_fast = 32.0, beta_slow = 1.0;              // yarn
  bool truncate = true;                                  // yarn: the range of dims ends at whole numbers
  double attention_factor = 0.0;              // yarn: scales cosines and sines; 0: from the factor and mscales
  double mscale = 0.0, mscale_all_dim = 0.0;  // yarn; 0: none
  bool operator==(const RopeScaling&) const = default;
};

struct ModelSpec {
  std::string family = "moebius";  // model_type: "moebius" (any combination), "qwen3_moe", "mixtral", ...

  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;         // num_hidden_layers
  int64_t num_heads = 0;          // num_attention_heads
  int64_t num_kv_heads = 0;       // num_key_value_heads
  int64_t head_dim = 0;           // width of q and k; with latent attention qk_nope_head_dim + qk_rope_head_dim
  int64_t intermediate_size = 0;  // FFN width of dense layers; 0 when there are none (always in mixtral)
  int64_t max_position_embeddings = 0;
  double rms_norm_eps = 1e-6;
  double rope_theta = 10000.0;
  RopeScaling rope_scaling;
  bool qkv_bias = false;  // biases of the q, k and v projections
  bool o_bias = false;    // bias of the o projection; with latent attention of q_a, kv_a and o
  QkNorm qk_norm = QkNorm::none;
  double clip_qkv = 0;  // q, k (after their norms) and v are clipped to this distance from 0; 0: not clipped (OLMoE)
  bool tie_word_embeddings = false;
  int64_t sliding_window = 0;        // keys [i - window + 1, i]; 0: all
  std::vector<bool> sliding_layers;  // for each layer, whether it has the window; empty: all have it
  bool attention_sinks = false;      // each head's softmax has one more logit, to which no value belongs
  double initializer_range = 0.02;

  // Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), if kv_lora_rank is above 0. Keys
  // and values come from one latent vector a token. Only qk_rope_head_dim of the head_dim columns
  // of q and k rotate; all heads share those columns of k.
  int64_t q_lora_rank = 0;  // 0: q has one projection and no latent vector
  int64_t kv_lora_rank = 0;
  int64_t qk_rope_head_dim = 0;
  int64_t v_head_dim = 0;
  bool rope_interleave = false;  // pairs (2i, 2i + 1) rotate, not (i, i + d/2)

  // Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the modules
  // that follow the layers. Each has two norms, a projection and one more layer like the
  // last (model/layers/mtp.h). num_nextn_predict_layers.
  int64_t num_mtp_layers = 0;

  // MoE. moe_layers[i]: whether layer i is an MoE layer. Without experts none is.
  std::vector<bool> moe_layers;
  int64_t num_experts = 0;
  int64_t top_k = 0;  // num_experts_per_tok
  int64_t moe_intermediate_size = 0;
  int64_t shared_intermediate_size = 0;  // 0: no shared expert
  bool shared_expert_gate = false;       // y += sigmoid(x w_g) * shared(x), Qwen2-MoE
  ScoreFunction score = ScoreFunction::softmax;
  // The weights of a token's experts are divided by their sum. "Softmax after top-k" is
  // softmax with this.
  bool norm_topk_prob = false;
  double routed_scaling_factor = 1.0;
  int64_t n_group = 1;  // groups of experts; topk_group of them are kept per token
  int64_t topk_group = 1;
  GroupScore group_score = GroupScore::sum_of_top;
  bool expert_bias = false;       // a correction bias is added to the scores, for the choice of experts only
  bool router_bias = false;       // bias of the router's logits
  bool expert_proj_bias = false;  // biases of gate, up and down of the routed experts
  // The activation of routed experts. 0: silu(gate) up. Above 0: gate is clipped to at most this, and up to
  // this distance from 0; the product is gate sigmoid(1.702 gate) (up + 1)  (gpt-oss, arXiv 2508.10925).
  double swiglu_limit = 0;

  JsonObject source;  // the config.json that it came from with unknown keys, for export; empty for a recipe's own keys

  bool is_latent() const { return kv_lora_rank > 0; }
  int64_t window_of(int64_t layer) const {  // layer: as in is_moe_layer
    return sliding_layers.empty() || sliding_layers[std::min(layer, num_layers - 1)] ? sliding_window : 0;
  }
  int64_t qk_nope_head_dim() const { return head_dim - qk_rope_head_dim; }
  int64_t rope_dim() const { return is_latent() ? qk_rope_head_dim : head_dim; }
  int64_t q_size() const { return num_heads * head_dim; }
  int64_t kv_size() const { return num_kv_heads * head_dim; }
  int64_t num_moe_layers() const;          // MoE layers among the num_layers
  bool is_moe_layer(int64_t layer) const;  // the modules' layers follow the others and are like the last
  int64_t num_layers_and_mtp() const { return num_layers + num_mtp_layers; }
  // Returns the number of trained elements. Tied embeddings count once; expert_bias is state and does not count.
  int64_t num_parameters() const;
  int64_t num_active_parameters() const;  // those that one token uses: top_k experts, shared, and the dense rest

  // Model FLOPs of one training token at a sequence length: forward, input gradients and weight
  // gradients. Attention counts its causal half. The router, norms, embedding look-up and recompute
  // are not counted (Megatron's convention).
  double train_flops_per_token(int64_t seq_len) const;

  // Throws Error{usage} if a shape is not positive, a division has a remainder, top_k is above the experts,
  // groups do not fit, or the keys of this family cannot express the model (a "qwen3_moe" has
  // no shared expert).
  void check() const;
  bool operator==(const ModelSpec&) const = default;
};

// Returns the model types that Moebius computes, by name.
std::vector<std::string> model_families();

// Returns the model of a config.json. `who` is the file's name in messages. Missing keys take the defaults of the
// family's config class in transformers; "moebius" has no default shapes. Layer i is an MoE layer if the
// model has experts and all of these that are given agree:
//   i >= first_k_dense_replace
//   i % moe_layer_freq == 0, or moe_layer_freq[i]
//   (i + 1) % decoder_sparse_step == 0
//   i is not in mlp_only_layers
// Keys of training (router_aux_loss_coef, router_jitter_noise, ...) are kept in source and have no effect:
// [moe] has keys of its own.
// Throws Error{input} that names the key if Moebius does not compute this model.
ModelSpec model_spec_from_hf(const nlohmann::json& config, const std::string& who);
// Returns the config.json of a model, in v4 spelling: source, with the keys of the spec written over it.
nlohmann::json hf_from_model_spec(const ModelSpec& spec);

}  // namespace moebius
