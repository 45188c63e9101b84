#include "model/block.h"

#include "model/attention/token_runs.h"
#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

std::string layer_name(int64_t layer, const char* what) { return fmt::format("model.layers.{}.{}", layer, what); }

template <class Attention, class... Args>
std::optional<Attention> make_attention(bool wanted, Args&&... args) {
  if (!wanted) return std::nullopt;
  return std::make_optional<Attention>(std::forward<Args>(args)...);
}

}  // namespace

Block::Block(ParamTable& params, MemoryPlan& plan, const ModelSpec& m, const BalanceSpec& balance, DType dtype,
             const Mesh& mesh, const BatchShape& shape, const Tensor& rope_table_Pd, int64_t layer, uint64_t seed,
             const std::string& dispatcher, bool fusion)
    : D_(m.hidden_size),
      max_tokens_(rows_between_projections(shape, mesh.shape())),
      dtype_(dtype),
      norm1_(params, layer_name(layer, "input_layernorm.weight"), D_, dtype, static_cast<float>(m.rms_norm_eps)),
      gqa_(make_attention<Gqa>(!m.is_latent(), params, layer_name(layer, "self_attn"), m, m.window_of(layer), dtype,
                               mesh, shape.cp_comm, rope_table_Pd)),
      mla_(make_attention<Mla>(m.is_latent(), params, layer_name(layer, "self_attn"), m, dtype, mesh, shape.cp_comm,
                               rope_table_Pd)),
      norm2_(params, layer_name(layer, "post_attention_layernorm.weight"), D_, dtype,
             static_cast<float>(m.rms_norm_eps)) {
  if (m.is_moe_layer(layer)) {
    moe_.emplace(params, plan, layer_name(layer, "mlp"), m, balance, dtype, mesh, shape, static_cast<uint32_t>(layer),
                 seed, dispatcher, fusion);
  } else {
    mlp_.emplace(params, layer_name(layer, "mlp"), D_, m.intermediate_size, dtype, mesh,
                 static_cast<float>(m.initializer_range), fusion);
  }
}

void Block::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  norm1_.declare_saved(plan, prefix + ".norm1", max_tokens_, saved.norm1);
  saved.n1_TD.declare(plan, prefix + ".n1", {max_tokens_, D_}, dtype_, &RecomputeSpec::norm);
  if (gqa_)
    gqa_->declare_saved(plan, prefix + ".attention", max_tokens_, saved.attention);
  else
    mla_->declare_saved(plan, prefix + ".attention", max_tokens_, saved.latent_attention);
  norm2_.declare_saved(plan, prefix + ".norm2", max_tokens_, saved.norm2, &RecomputeSpec::layer);
  saved.n2_TD.declare(plan, prefix + ".n2", {max_tokens_, D_}, dtype_, &RecomputeSpec::norm);
  if (moe_)
    moe_->declare_saved(plan, prefix + ".moe", saved.moe);
  else
    mlp_->declare_saved(plan, prefix + ".mlp", max_tokens_, saved.mlp, &RecomputeSpec::mlp);
}

void Block::forward(Step& step, Residual& residual, Saved& saved) const {
  const int64_t T = residual.delta_TD.dim(0);
  StackScope scope(step.stack);
  saved.n1_TD.open(step.stack);
  const Tensor n1_TD = saved.n1_TD.rows(0, T), attended_TD = step.alloc({T, D_}, dtype_);
  norm1_.forward(step, n1_TD, residual.delta_TD, residual.base_TD, saved.norm1);
  attend(step, attended_TD, n1_TD, saved);
  feed_forward(step, residual, attended_TD, saved);
}

void Block::attend(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  if (gqa_) return gqa_->forward(step, y_TD, x_TD, saved.attention);
  mla_->forward(step, y_TD, x_TD, saved.latent_attention);
}

void Block::remake_attention(Step& step, Saved& saved) const {
  if (gqa_) return gqa_->remake(step, saved.n1_TD, saved.attention);
  mla_->remake(step, saved.n1_TD, saved.latent_attention);
}

void Block::attention_output(Step& step, Tensor y_TD, const Saved& saved) const {
  if (gqa_) return gqa_->output(step, y_TD, saved.attention);
  mla_->output(step, y_TD, saved.latent_attention);
}

void Block::attend_backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  if (gqa_) {
    gqa_->backward_input(step, dx_TD, dy_TD, saved.attention);
    return gqa_->backward_weight(step, saved.attention);
  }
  mla_->backward_input(step, dx_TD, dy_TD, saved.latent_attention);
  mla_->backward_weight(step, saved.latent_attention);
}

void Block::feed_forward(Step& step, Residual& residual, Tensor attended_TD, Saved& saved) const {
  const int64_t T = attended_TD.dim(0);
  saved.n2_TD.open(step.stack);
  saved.norm2.sum_TD.open_in(residual.room_TD);
  const Tensor n2_TD = saved.n2_TD.rows(0, T);
  norm2_.forward(step, n2_TD, attended_TD, saved.norm1.sum_TD.rows(0, T), saved.norm2);
  if (moe_)
    moe_->forward(step, residual.delta_TD, n2_TD, saved.moe);
  else
    mlp_->forward(step, residual.delta_TD, n2_TD, saved.mlp);
  residual.base_TD = saved.norm2.sum_TD.rows(0, T);
}

// In the order of forward: each is made of those before it.
void Block::remake(Step& step, Saved& saved) const {
  saved.n1_TD.remake(step.stack, [&] { norm1_.again(step, saved.n1_TD, saved.norm1); });
  remake_attention(step, saved);
  saved.norm2.sum_TD.remake(step.stack, [&] {
    attention_output(step, saved.norm2.sum_TD, saved);
    add(step.stream, saved.norm2.sum_TD, saved.norm1.sum_TD);
  });
  saved.n2_TD.remake(step.stack, [&] { norm2_.again(step, saved.n2_TD, saved.norm2); });
  if (moe_)
    moe_->remake(step, saved.n2_TD, saved.moe);
  else
    mlp_->remake(step, saved.n2_TD, saved.mlp);
}

void Block::backward(Step& step, Tensor dresidual_TD, Saved& saved) const {
  const Shape TD = dresidual_TD.shape;
  StackScope remade(step.stack);
  remake(step, saved);
  {
    StackScope scope(step.stack);
    const Tensor dn2_TD = step.alloc(TD, dtype_);
    if (moe_) {
      moe_->backward_input(step, dn2_TD, dresidual_TD, saved.moe);
      moe_->backward_weight(step, saved.moe);
    } else {
      mlp_->backward_input(step, dn2_TD, dresidual_TD, saved.mlp);
      mlp_->backward_weight(step, saved.mlp);
    }
    norm2_.backward(step, dresidual_TD, dn2_TD, saved.norm2);
  }
  StackScope scope(step.stack);
  const Tensor dn1_TD = step.alloc(TD, dtype_);
  attend_backward(step, dn1_TD, dresidual_TD, saved);
  norm1_.backward(step, dresidual_TD, dn1_TD, saved.norm1);
}

void Block::forward_cached(Step& step, Residual& residual, Saved& saved, const KvCache& cache, int64_t first) const {
  const int64_t T = residual.delta_TD.dim(0);
  StackScope scope(step.stack);
  saved.n1_TD.open(step.stack);
  const Tensor n1_TD = saved.n1_TD.rows(0, T), attended_TD = step.alloc({T, D_}, dtype_);
  norm1_.forward(step, n1_TD, residual.delta_TD, residual.base_TD, saved.norm1);
  if (gqa_)
    gqa_->forward_cached(step, attended_TD, n1_TD, cache, first);
  else
    mla_->forward_cached(step, attended_TD, n1_TD, cache, first);
  feed_forward(step, residual, attended_TD, saved);
}

}  // namespace moebius
