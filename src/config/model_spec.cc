#include "config/model_spec.h"

#include <algorithm>

#include "config/hf/config.h"
#include "config/recipe/value_rule.h"
#include "core/error.h"

namespace moebius {

namespace {

// The FFN weights of one layer that one token uses, divided by hidden_size: gate, up and down.
constexpr int64_t kGatedMatrices = 3;

// Returns the parameters of the matrices of latent attention: with x, with the query's latent (or x), with the latent
// of keys and values, and with o.
int64_t latent_matrices(const ModelSpec& m) {
  const int64_t q = m.q_lora_rank > 0 ? m.q_lora_rank * (m.hidden_size + m.q_size()) : m.hidden_size * m.q_size();
  const int64_t down = m.hidden_size * (m.kv_lora_rank + m.qk_rope_head_dim);
  const int64_t up = m.kv_lora_rank * m.num_heads * (m.qk_nope_head_dim() + m.v_head_dim);
  return q + down + up + m.num_heads * m.v_head_dim * m.hidden_size;
}

int64_t latent_norms(const ModelSpec& m) { return m.q_lora_rank + m.kv_lora_rank; }

int64_t attention_parameters(const ModelSpec& m) {
  if (m.is_latent()) {
    const int64_t biases = m.o_bias ? m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim + m.hidden_size : 0;
    return latent_matrices(m) + latent_norms(m) + biases;
  }
  const int64_t biases = (m.qkv_bias ? m.q_size() + 2 * m.kv_size() : 0) + (m.o_bias ? m.hidden_size : 0);
  const int64_t sinks = m.attention_sinks ? m.num_heads : 0;
  int64_t norms = 0;
  if (m.qk_norm == QkNorm::per_head) norms = 2 * m.head_dim;
  if (m.qk_norm == QkNorm::whole) norms = m.q_size() + m.kv_size();
  return m.hidden_size * (2 * m.q_size() + 2 * m.kv_size()) + biases + sinks + norms;
}

int64_t embedding_parameters(const ModelSpec& m) {
  return (m.tie_word_embeddings ? 1 : 2) * m.vocab_size * m.hidden_size;
}

// Returns the parameters of an MoE block of which num_experts experts are counted.
int64_t moe_parameters(const ModelSpec& m, int64_t num_experts) {
  const int64_t router = m.num_experts * (m.hidden_size + (m.router_bias ? 1 : 0));
  const int64_t biases = m.expert_proj_bias ? num_experts * (2 * m.moe_intermediate_size + m.hidden_size) : 0;
  const int64_t gate = m.shared_expert_gate ? m.hidden_size : 0;
  const int64_t width = num_experts * m.moe_intermediate_size + m.shared_intermediate_size;
  return router + biases + gate + kGatedMatrices * m.hidden_size * width;
}

int64_t moe_layers_and_mtp(const ModelSpec& m) {
  return m.num_moe_layers() + (m.num_mtp_layers > 0 && m.is_moe_layer(m.num_layers) ? m.num_mtp_layers : 0);
}

int64_t parameters_with(const ModelSpec& m, int64_t num_experts) {
  const int64_t layers = m.num_layers_and_mtp(), moe_layers = moe_layers_and_mtp(m);
  const int64_t layer = attention_parameters(m) + 2 * m.hidden_size;
  const int64_t mtp = m.num_mtp_layers * (3 + 2 * m.hidden_size) * m.hidden_size;  // three norms and the projection
  return embedding_parameters(m) + m.hidden_size + layers * layer + mtp +
         (layers - moe_layers) * kGatedMatrices * m.hidden_size * m.intermediate_size +
         moe_layers * moe_parameters(m, num_experts);
}

void check_count(const char* key, int64_t value, int64_t min) {
  MOEBIUS_CHECK(usage, value >= min && value <= kMaxCount, "model: {} must be from {} to {}; got {}", key, min,
                kMaxCount, value);
}

void check_latent(const ModelSpec& m) {
  check_count("q_lora_rank", m.q_lora_rank, 0);
  check_count("kv_lora_rank", m.kv_lora_rank, 1);
  check_count("qk_nope_head_dim", m.qk_nope_head_dim(), 1);
  check_count("qk_rope_head_dim", m.qk_rope_head_dim, 2);
  check_count("v_head_dim", m.v_head_dim, 1);
  MOEBIUS_CHECK(usage, m.qk_rope_head_dim % 2 == 0, "model: qk_rope_head_dim must be even, RoPE rotates pairs; got {}",
                m.qk_rope_head_dim);
  MOEBIUS_CHECK(usage, m.num_kv_heads == m.num_heads,
                "model: num_key_value_heads must be num_attention_heads = {} with latent attention; got {}",
                m.num_heads, m.num_kv_heads);
  MOEBIUS_CHECK(
      usage, !m.qkv_bias && m.qk_norm == QkNorm::none && m.clip_qkv == 0 && m.sliding_window == 0 && !m.attention_sinks,
      "model: latent attention (kv_lora_rank above 0) has no qkv_bias, qk_norm, clip_qkv, sliding_window or "
      "attention_sinks; remove them");
}

void check_attention(const ModelSpec& m) {
  MOEBIUS_CHECK(usage, m.qk_norm != QkNorm::per_head || m.clip_qkv == 0,
                "model: clip_qkv goes with qk_norm false or \"whole\"; got true, a norm of each head");
  MOEBIUS_CHECK(usage, m.qkv_bias || !m.o_bias || m.is_latent(),
                "model: a bias on o goes with those on q, k and v (attention_bias); got it without qkv_bias");
  const auto sliding = std::count(m.sliding_layers.begin(), m.sliding_layers.end(), true);
  const bool some = sliding > 0 && sliding < m.num_layers && std::ssize(m.sliding_layers) == m.num_layers;
  MOEBIUS_CHECK(usage, m.sliding_layers.empty() || (m.sliding_window > 0 && some),
                "model: layer_types must give some of the {} layers the sliding_window and others none; got {} of {} "
                "and a window of {}",
                m.num_layers, sliding, m.sliding_layers.size(), m.sliding_window);
}

void check_shapes(const ModelSpec& m) {
  check_count("vocab_size", m.vocab_size, 1);
  check_count("hidden_size", m.hidden_size, 1);
  check_count("num_hidden_layers", m.num_layers, 1);
  check_count("num_attention_heads", m.num_heads, 1);
  check_count("num_key_value_heads", m.num_kv_heads, 1);
  check_count("head_dim", m.head_dim, 1);
  check_count("max_position_embeddings", m.max_position_embeddings, 1);
  check_count("sliding_window", m.sliding_window, 0);
  check_count("num_nextn_predict_layers", m.num_mtp_layers, 0);
  check_count("num_experts", m.num_experts, 0);
  MOEBIUS_CHECK(usage, m.num_heads % m.num_kv_heads == 0,
                "model: num_attention_heads must be divisible by num_key_value_heads; got {} and {}", m.num_heads,
                m.num_kv_heads);
  check_attention(m);
  if (m.is_latent()) return check_latent(m);
  MOEBIUS_CHECK(usage, m.head_dim % 2 == 0, "model: head_dim must be even, RoPE rotates halves; got {}", m.head_dim);
}

void check_scalars(const ModelSpec& m) {
  const auto check = [](const char* key, double value, const ValueRule& rule) {
    MOEBIUS_CHECK(usage, rule.accepts(value), "model: {} must be {}; got {}", key, rule.expects, value);
  };
  check("rms_norm_eps", m.rms_norm_eps, float_above_zero());
  check("rope_theta", m.rope_theta, number_above(0));
  check("initializer_range", m.initializer_range, float_or_zero());
  check("routed_scaling_factor", m.routed_scaling_factor, float_above_zero());
  check("swiglu_limit", m.swiglu_limit, float_or_zero());
  check("clip_qkv", m.clip_qkv, float_or_zero());
}

void check_layers(const ModelSpec& m) {
  MOEBIUS_CHECK(usage, static_cast<int64_t>(m.moe_layers.size()) == m.num_layers,
                "model: moe_layers must have an entry for each of the {} layers; got {}", m.num_layers,
                m.moe_layers.size());
  MOEBIUS_CHECK(usage, m.num_experts > 0 || m.num_moe_layers() == 0,
                "model: {} layers are MoE layers but num_experts is 0; set num_experts", m.num_moe_layers());
  if (m.num_moe_layers() < m.num_layers) check_count("intermediate_size", m.intermediate_size, 1);
}

void check_groups(const ModelSpec& m) {
  MOEBIUS_CHECK(usage, m.n_group >= 1 && m.num_experts % m.n_group == 0,
                "model: num_experts must be divisible by n_group; got {} and {}", m.num_experts, m.n_group);
  MOEBIUS_CHECK(usage, m.topk_group >= 1 && m.topk_group <= m.n_group,
                "model: topk_group must be from 1 to n_group = {}; got {}", m.n_group, m.topk_group);
  const int64_t reachable = m.num_experts / m.n_group * m.topk_group;
  MOEBIUS_CHECK(usage, m.top_k <= reachable,
                "model: num_experts_per_tok must be at most the {} experts of topk_group groups; got {}", reachable,
                m.top_k);
  MOEBIUS_CHECK(usage, m.n_group == 1 || m.group_score != GroupScore::sum_of_two || m.num_experts / m.n_group >= 2,
                "model: each of the n_group = {} groups must have two experts when the sum of its best two scores it; "
                "got num_experts = {}",
                m.n_group, m.num_experts);
  const bool summed = m.n_group > 1 && m.group_score == GroupScore::sum_of_top;
  MOEBIUS_CHECK(
      usage, !summed || m.top_k % m.topk_group == 0,
      "model: num_experts_per_tok must be divisible by topk_group when group_score is \"sum_of_top\"; got {} and {}",
      m.top_k, m.topk_group);
}

void check_experts(const ModelSpec& m) {
  check_count("moe_intermediate_size", m.moe_intermediate_size, 1);
  check_count("shared_expert_intermediate_size", m.shared_intermediate_size, 0);
  MOEBIUS_CHECK(usage, m.top_k >= 1 && m.top_k <= m.num_experts,
                "model: num_experts_per_tok must be from 1 to num_experts = {}; got {}", m.num_experts, m.top_k);
  MOEBIUS_CHECK(usage, !m.shared_expert_gate || m.shared_intermediate_size > 0,
                "model: shared_expert_gate needs a shared expert; set shared_expert_intermediate_size");
  const bool only_routed = m.num_moe_layers() == m.num_layers && m.shared_intermediate_size == 0;
  MOEBIUS_CHECK(usage, only_routed || (m.swiglu_limit == 0 && !m.expert_proj_bias),
                "model: swiglu_limit and mlp_bias are of routed experts, so every layer must have only those; got "
                "{} MoE layers of {} and a shared expert of {}",
                m.num_moe_layers(), m.num_layers, m.shared_intermediate_size);
  check_groups(m);
}

// If the largest of the products below fits int64, all of them do.
void check_size(const ModelSpec& m) {
  constexpr double kMax = 1e15;
  const double width =
      double(m.num_experts) * m.moe_intermediate_size + m.shared_intermediate_size + m.intermediate_size;
  const double heads = 2.0 * (double(m.num_heads) + m.num_kv_heads) * m.head_dim;
  const double latent = double(m.q_lora_rank + m.kv_lora_rank) * (m.hidden_size + heads + m.v_head_dim);
  const double layer = double(m.hidden_size) * (heads + kGatedMatrices * width + m.num_experts) + latent;
  const double mtp = double(m.num_mtp_layers) * (layer + 2.0 * m.hidden_size * m.hidden_size);
  // Each of an expert's matrices is a tensor with a name.
  constexpr double kMaxExperts = 1 << 20;
  MOEBIUS_CHECK(usage, double(m.num_experts) * m.num_layers <= kMaxExperts,
                "model: at most {} experts are possible in all layers; got num_experts = {} and num_hidden_layers = {}",
                kMaxExperts, m.num_experts, m.num_layers);
  const double elements = m.num_layers * layer + mtp + 2.0 * m.vocab_size * m.hidden_size;
  MOEBIUS_CHECK(usage, elements <= kMax, "model: at most {:g} parameters are possible; got about {:g}", kMax, elements);
}

}  // namespace

int64_t ModelSpec::num_moe_layers() const { return std::count(moe_layers.begin(), moe_layers.end(), true); }

bool ModelSpec::is_moe_layer(int64_t layer) const {
  return moe_layers[static_cast<size_t>(std::min(layer, num_layers - 1))];
}

int64_t ModelSpec::num_parameters() const { return parameters_with(*this, num_experts); }
int64_t ModelSpec::num_active_parameters() const { return parameters_with(*this, top_k); }

// FLOPs per token: 2 per multiply-add, 3 for forward, input gradient and weight gradient. Attention
// does q k^T and p v, num_heads times their width in multiply-adds per key, over half of the
// seq_len keys. Megatron counts the norms of latents and of multi-token prediction.
double ModelSpec::train_flops_per_token(int64_t seq_len) const {
  const double h = hidden_size, mtp = num_mtp_layers;
  const double moe = moe_layers_and_mtp(*this);
  const double layers = num_layers_and_mtp(), dense = layers - moe;
  const double projections = is_latent() ? static_cast<double>(latent_matrices(*this) + latent_norms(*this))
                                         : h * (2.0 * q_size() + 2.0 * kv_size());
  const double routed = static_cast<double>(top_k) * moe_intermediate_size;
  const double ffn = dense * intermediate_size + moe * (routed + shared_intermediate_size);
  const double core = num_heads * (head_dim + (is_latent() ? v_head_dim : head_dim)) / 2.0 * seq_len;
  const double logits = h * vocab_size * (1 + mtp), mtp_inputs = mtp * (3 + 2 * h) * h;
  return 6.0 * (h * kGatedMatrices * ffn + layers * (projections + core) + mtp_inputs + logits);
}

void ModelSpec::check() const {
  check_shapes(*this);
  check_scalars(*this);
  check_layers(*this);
  if (num_experts > 0) check_experts(*this);
  check_size(*this);
  check_family(*this);
}

}  // namespace moebius
