// That no key is passed over with which transformers computes: the fields of its config classes
// (5.24), those that all have and those of each family, and what its masks, caches and rotary
// frequencies look up beside them.
#include "config/hf/keys.h"

#include <gtest/gtest.h>

#include <iterator>
#include <map>
#include <set>
#include <sstream>

namespace moebius {
namespace {

std::set<std::string> words(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<std::string>(in), {}};
}

const std::string kOfAll =
    "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads hidden_act "
    "intermediate_size max_position_embeddings initializer_range rms_norm_eps use_cache pad_token_id bos_token_id "
    "eos_token_id tie_word_embeddings rope_parameters attention_dropout "
    "transformers_version architectures output_hidden_states return_dict dtype chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id problem_type output_attentions "
    "rope_scaling rope_theta partial_rotary_factor original_max_position_embeddings is_causal per_layer_config "
    "attention_chunk_size ";

const std::map<std::string, std::string> kOfFamily = {
    {"llama", "pretraining_tp attention_bias mlp_bias head_dim"},
    {"mistral", "head_dim sliding_window"},
    {"qwen2", "use_sliding_window sliding_window max_window_layers layer_types"},
    {"qwen3", "head_dim attention_bias use_sliding_window sliding_window max_window_layers layer_types"},
    {"mixtral",
     "head_dim sliding_window num_experts_per_tok num_local_experts num_experts output_router_logits "
     "router_aux_loss_coef router_jitter_noise"},
    {"qwen2_moe",
     "use_sliding_window sliding_window max_window_layers decoder_sparse_step moe_intermediate_size "
     "shared_expert_intermediate_size num_experts_per_tok num_experts norm_topk_prob output_router_logits "
     "router_aux_loss_coef mlp_only_layers qkv_bias layer_types head_dim"},
    {"qwen3_moe",
     "attention_bias use_sliding_window sliding_window decoder_sparse_step moe_intermediate_size num_experts_per_tok "
     "num_experts num_local_experts norm_topk_prob output_router_logits router_aux_loss_coef mlp_only_layers head_dim"},
    {"olmoe",
     "attention_bias clip_qkv num_experts_per_tok num_experts num_local_experts output_router_logits "
     "router_aux_loss_coef norm_topk_prob head_dim"},
    {"deepseek_v2",
     "pretraining_tp attention_bias mlp_bias head_dim first_k_dense_replace kv_lora_rank q_lora_rank n_group "
     "n_routed_experts num_experts n_shared_experts qk_nope_head_dim qk_rope_head_dim routed_scaling_factor topk_group "
     "topk_method norm_topk_prob v_head_dim num_experts_per_tok moe_intermediate_size"},
    {"deepseek_v3",
     "moe_intermediate_size n_shared_experts n_routed_experts num_local_experts routed_scaling_factor kv_lora_rank "
     "q_lora_rank qk_rope_head_dim v_head_dim qk_nope_head_dim n_group topk_group num_experts_per_tok "
     "first_k_dense_replace norm_topk_prob pretraining_tp rope_interleave attention_bias head_dim num_mtp_layers "
     "num_nextn_predict_layers output_router_logits"},
    {"gpt_oss",
     "num_local_experts num_experts head_dim sliding_window num_experts_per_tok router_aux_loss_coef "
     "output_router_logits layer_types attention_bias swiglu_alpha swiglu_limit"}};

// Keys that change no logit and no loss of these classes.
bool has_no_effect(const std::string& family, const std::string& key) {
  // These keys are about tensors kept and returned beside the logits, the ids of generation, and
  // heads of other tasks. The chunk sizes are of the cache.
  static const std::set<std::string> of_all = words(
      "use_cache pad_token_id bos_token_id eos_token_id transformers_version architectures output_hidden_states "
      "return_dict dtype chunk_size_feed_forward is_encoder_decoder id2label label2id problem_type output_attentions "
      "attention_chunk_size pretraining_tp");
  // These keys are about training. A recipe gives them: moe.balance, moe.aux_coeff, moe.jitter.
  static const std::set<std::string> of_training =
      words("output_router_logits router_aux_loss_coef router_jitter_noise");
  // The classes of latent attention set it themselves.
  if (key == "head_dim" && (family_bit(family) & kDeepseek)) return true;
  return of_all.contains(key) || of_training.contains(key);
}

TEST(HfKeys, EveryKeyOfTransformersIsReadOrRefusedOrWithoutEffect) {
  for (const std::string& family : model_families()) {
    if (family == "moebius") continue;
    std::set<std::string> of_files;
    for (const HfKey& key : hf_file_keys()) {
      if (key.families & family_bit(family)) of_files.insert(key.name);
    }
    ASSERT_TRUE(kOfFamily.contains(family)) << family;
    for (const std::string& key : words(kOfAll + kOfFamily.at(family))) {
      const bool taken = has_hf_key(family, key) || of_files.contains(key);
      EXPECT_NE(taken, has_no_effect(family, key)) << family << ": " << key;
    }
  }
}

}  // namespace
}  // namespace moebius
