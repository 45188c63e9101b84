#include "model/block.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

std::string layer_name(int64_t layer, const char* what) { return fmt::format("model.layers.{}.{}", layer, what); }

Norm make_norm(const LayerContext& c, const std::string& name) {
  return Norm(c.params, name, c.model.hidden_size, c.dtype, c.norm_eps());
}

bool trains_any(const ParamTable& params, const std::string& prefix) {
  return std::any_of(params.all().begin(), params.all().end(),
                     [&](const Param& p) { return p.has_grad && p.spec.name.starts_with(prefix); });
}

}  // namespace

Block::Block(const LayerContext& c, int64_t layer)
    : D_(c.model.hidden_size),
      max_tokens_(c.stream_rows()),
      dtype_(c.dtype),
      norm1_(make_norm(c, layer_name(layer, "input_layernorm.weight"))),
      attention_(make_attention(c, layer_name(layer, "self_attn"), layer)),
      norm2_(make_norm(c, layer_name(layer, "post_attention_layernorm.weight"))),
      feed_forward_(make_feed_forward(c, layer_name(layer, "mlp"), layer)),
      trains_attention_(trains_any(c.params, layer_name(layer, "self_attn."))) {}

void Block::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  norm1_.declare_saved(plan, prefix + ".norm1", max_tokens_, saved.norm1);
  saved.n1_TD.declare(plan, prefix + ".n1", {max_tokens_, D_}, dtype_, &RecomputeSpec::norm);
  saved.attention = attention_->declare_saved(plan, prefix + ".attention");
  norm2_.declare_saved(plan, prefix + ".norm2", max_tokens_, saved.norm2, &RecomputeSpec::layer);
  saved.n2_TD.declare(plan, prefix + ".n2", {max_tokens_, D_}, dtype_, &RecomputeSpec::norm);
  saved.feed_forward = feed_forward_->declare_saved(plan, prefix);
}

void Block::forward(Step& step, Residual& residual, Saved& saved) const {
  const auto attend = [&](Tensor y_TD, const RmsNormFwd& norm) {
    rms_norm_fwd(step.stream, norm);
    attention_->forward(step, y_TD, norm.y_TD, *saved.attention);
  };
  run_forward(step, residual, saved, attend, [&](Tensor y_TD, const RmsNormFwd& norm) {
    rms_norm_fwd(step.stream, norm);
    feed_forward_->forward(step, y_TD, norm.y_TD, *saved.feed_forward);
  });
}

void Block::forward_cached(Step& step, Residual& residual, Saved& saved, const KvCache& cache,
                           const CachedRows& rows) const {
  const auto attend = [&](Tensor y_TD, const RmsNormFwd& norm) {
    attention_->forward_cached(step, y_TD, norm, cache, rows);
  };
  run_forward(step, residual, saved, attend, [&](Tensor y_TD, const RmsNormFwd& norm) {
    feed_forward_->forward_normed(step, y_TD, norm, *saved.feed_forward);
  });
}

template <class Attend, class Feed>
void Block::run_forward(Step& step, Residual& residual, Saved& saved, Attend attend, Feed feed) const {
  const int64_t T = residual.delta_TD.dim(0);
  StackScope scope(step.stack);
  saved.n1_TD.open(step.stack);
  saved.n2_TD.open_in(saved.n1_TD);  // if they are not kept: attention is the last to read n1
  saved.norm2.sum_TD.open_in(residual.buffer_TD);
  const Tensor n1_TD = saved.n1_TD.rows(0, T), n2_TD = saved.n2_TD.rows(0, T);
  RmsNormFwd norm2;
  {
    StackScope attention(step.stack);
    const Tensor attended_TD = step.alloc({T, D_}, dtype_);
    attend(attended_TD, norm1_.op(step, n1_TD, residual.delta_TD, residual.base_TD, saved.norm1));
    norm2 = norm2_.op(step, n2_TD, attended_TD, saved.norm1.sum_TD.rows(0, T), saved.norm2);
  }
  feed(residual.delta_TD, norm2);  // its first kernel is the last one that reads what attention has left on the stack
  residual.base_TD = saved.norm2.sum_TD.rows(0, T);
}

Attention::Input Block::attention_input(Step& step, Saved& saved) const {
  return [this, &step, &saved]() -> Tensor {
    saved.n1_TD.recompute(step.stack, [&] { norm1_.recompute(step, saved.n1_TD, saved.norm1); });
    return saved.n1_TD;
  };
}

// In the order of forward: each tensor is computed from those before it.
void Block::recompute_attention(Step& step, Saved& saved) const {
  attention_->recompute(step, attention_input(step, saved), *saved.attention);
}

// Its input has memory only where attention reads it.
void Block::attention_backward_weight(Step& step, Saved& saved) const {
  StackScope scope(step.stack);
  if (!attention_->holds_input(*saved.attention))
    attention_->set_input(attention_input(step, saved)(), *saved.attention);
  attention_->backward_weight(step, *saved.attention);
}

void Block::recompute_feed_forward(Step& step, Saved& saved) const {
  saved.norm2.sum_TD.recompute(step.stack, [&] {
    attention_->output(step, saved.norm2.sum_TD, *saved.attention);
    add(step.stream, saved.norm2.sum_TD, saved.norm1.sum_TD);
  });
  saved.n2_TD.recompute(step.stack, [&] { norm2_.recompute(step, saved.n2_TD, saved.norm2); });
  feed_forward_->recompute(step, saved.n2_TD, *saved.feed_forward);
}

void Block::backward(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input) const {
  run_backward(step, dresidual_TD, saved, {.weights = true, .input = with_input});
}

void Block::backward_input(Step& step, Tensor dresidual_TD, Saved& saved, bool with_input) const {
  run_backward(step, dresidual_TD, saved, {.weights = false, .input = with_input});
}

void Block::run_backward(Step& step, Tensor dresidual_TD, Saved& saved, BackwardParts parts) const {
  const Shape TD = dresidual_TD.shape;
  StackScope recomputed(step.stack);
  recompute_attention(step, saved);
  {
    StackScope scope(step.stack);  // for tensors that attention's backward does not read
    recompute_feed_forward(step, saved);
    const Tensor dn2_TD = step.alloc(TD, dtype_);
    if (parts.weights)
      feed_forward_->backward(step, dn2_TD, dresidual_TD, *saved.feed_forward);
    else
      feed_forward_->backward_input(step, dn2_TD, dresidual_TD, *saved.feed_forward);
    norm2_.backward(step, dresidual_TD, dn2_TD, saved.norm2);
  }
  const bool to_norm1 = parts.input || norm1_.has_gradient();
  if (!to_norm1 && !trains_attention_) return;
  StackScope scope(step.stack);
  Attention::InputGradient dn1 =
      attention_->backward_input(step, dresidual_TD, *saved.attention, to_norm1, attention_input(step, saved));
  if (parts.weights && trains_attention_) attention_backward_weight(step, saved);
  dn1.sum.wait();
  if (to_norm1) norm1_.backward(step, dresidual_TD, dn1.dx_tD, saved.norm1);
}

void Block::backward_weight(Step& step, Saved& saved) const {
  StackScope recomputed(step.stack);
  recompute_attention(step, saved);
  recompute_feed_forward(step, saved);
  feed_forward_->backward_weight(step, *saved.feed_forward);
  if (trains_attention_) attention_backward_weight(step, saved);
}

void Block::declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const {
  attention_->declare_cache(plan, prefix, num_tokens, cache);
}

std::vector<KeptTensor> Block::kept(const Saved& saved) const {
  std::vector<KeptTensor> all{{"input", saved.norm1.sum_TD.kept()}, {"attention norm output", saved.n1_TD.kept()}};
  const auto add_all = [&](const std::vector<KeptTensor>& more) { all.insert(all.end(), more.begin(), more.end()); };
  add_all(attention_->kept(*saved.attention));
  add_all({{"residual after attention", saved.norm2.sum_TD.kept()}, {"feed-forward norm output", saved.n2_TD.kept()}});
  add_all(feed_forward_->kept(*saved.feed_forward));
  return all;
}

}  // namespace moebius
