#include "model/model.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/rope/rope.h"

namespace moebius {
Model::Model(const ModelSpec& model, const BalanceSpec& balance, const PrecisionSpec& precision, const Mesh& mesh,
             MemoryPlan& plan, ModelUse use, const BatchShape& shape, int64_t max_positions, uint64_t seed)
    : spec_(model),
      dtype_(precision.compute),
      shape_(shape),
      mesh_(mesh),
      params_(plan, use),
      embedding_(params_, model, dtype_, mesh),
      blocks_([&] {
        std::deque<Block> blocks;
        for (int64_t i = 0; i < model.num_layers; ++i) {
          blocks.emplace_back(params_, plan, model, balance, dtype_, mesh, shape, rope_table_Pd_, i, seed);
        }
        return blocks;
      }()),
      final_norm_(params_, "model.norm.weight", model.hidden_size, dtype_, static_cast<float>(model.rms_norm_eps)),
      head_(params_, model, dtype_, mesh, model.tie_word_embeddings ? &embedding_.table() : nullptr),
      saved_(use == ModelUse::inference ? 1 : model.num_layers) {
  const int64_t T = shape.tokens(), D = model.hidden_size;
  plan.declare(rope_table_Pd_, "rope_table", {max_positions, model.head_dim}, DType::f32, Life::state);
  // Layers differ (dense or MoE): the one set that inference shares is declared by the first of each kind.
  bool declared_dense = false, declared_moe = false;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    bool& declared = blocks_[i].moe() ? declared_moe : declared_dense;
    if (use == ModelUse::inference && declared) continue;
    declared = true;
    blocks_[i].declare_saved(plan, fmt::format("layer{}", i), saved_of(i));
  }
  final_norm_.declare_saved(plan, "final_norm", T, saved_final_);
  plan.declare(final_TD_, "final", {T, D}, dtype_, Life::saved);
  if (use != ModelUse::inference) plan.declare(dfinal_TD_, "dfinal", {T, D}, dtype_, Life::saved);
  plan.declare(loss_T_, "loss", {shape.rows()}, DType::f32, Life::saved);
  plan.declare(loss_sum_1_, "loss_sum", {1}, DType::f64, Life::metrics);
}

void Model::init_state(Stream& s) const {
  rope_table(s, {.cos_sin_Pd = rope_table_Pd_, .theta = spec_.rope_theta});
  for (const Block& block : blocks_) {
    if (block.moe()) block.moe()->router().init_state(s);
  }
}

void Model::forward_hidden(Step& step, int64_t T) {
  StackScope scope(step.stack);
  Residual residual{.delta_TD = step.take({T, spec_.hidden_size}, dtype_)};
  embedding_.forward(step, residual.delta_TD, step.batch.token_T.rows(0, T * shape_.tp));
  for (size_t i = 0; i < blocks_.size(); ++i) {
    PhaseScope phase(step.stream, "forward", static_cast<int64_t>(i));
    blocks_[i].forward(step, residual, saved_of(i));
  }
  final_norm_.forward(step, final_TD_.rows(0, T), residual.delta_TD, residual.base_TD, saved_final_);
}

void Model::forward_loss(Step& step, bool with_gradients) {
  head_.loss(step, loss_T_, with_gradients ? dfinal_TD_ : Tensor{}, final_TD_);
  sum_into(step.stream, {.out_1 = loss_sum_1_, .x = loss_T_});
}

void Model::backward(Step& step) {
  StackScope scope(step.stack);
  const Tensor dresidual_TD = step.take(dfinal_TD_.shape, dtype_);
  fill_zero(step.stream, dresidual_TD);
  final_norm_.backward(step, dresidual_TD, dfinal_TD_, saved_final_);
  for (size_t i = blocks_.size(); i-- > 0;) {
    PhaseScope phase(step.stream, "backward", static_cast<int64_t>(i));
    blocks_[i].backward(step, dresidual_TD, saved_of(i));
  }
  embedding_.backward_weight(step, dresidual_TD, step.batch.token_T);
}

void Model::logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end) const {
  head_.logits(step, logits_CV, final_TD_.rows(begin, end));
}

void Model::declare_caches(MemoryPlan& plan, std::vector<KvCache>& caches, int64_t max_tokens) const {
  caches.resize(blocks_.size());
  const Shape shape{max_tokens, spec_.num_kv_heads, spec_.head_dim};
  for (size_t i = 0; i < caches.size(); ++i) {
    plan.declare(caches[i].k_UGd, fmt::format("layer{}.k_cache", i), shape, dtype_, Life::saved);
    plan.declare(caches[i].v_UGd, fmt::format("layer{}.v_cache", i), shape, dtype_, Life::saved);
  }
}

void Model::forward_cached(Step& step, std::vector<KvCache>& caches, int64_t first, int64_t T) {
  StackScope scope(step.stack);
  Residual residual{.delta_TD = step.take({T, spec_.hidden_size}, dtype_)};
  embedding_.forward(step, residual.delta_TD, step.batch.token_T.rows(0, T * shape_.tp));
  for (size_t i = 0; i < blocks_.size(); ++i) blocks_[i].forward_cached(step, residual, saved_of(i), caches[i], first);
  final_norm_.forward(step, final_TD_.rows(0, T), residual.delta_TD, residual.base_TD, saved_final_);
}

std::vector<Model::MoeLayer> Model::moe_layers() const {
  std::vector<MoeLayer> layers;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    if (blocks_[i].moe()) layers.push_back({static_cast<int64_t>(i), blocks_[i].moe(), &saved_of(i).moe});
  }
  return layers;
}

std::vector<std::pair<std::string, Tensor>> Model::kept_tensors() const {
  std::vector<std::pair<std::string, Tensor>> kept;
  for (size_t i = 0; i < blocks_.size(); ++i) {
    const Block::Saved& saved = saved_of(i);
    const auto add = [&](const char* what, const Tensor& t) {
      if (!t.empty()) kept.emplace_back(fmt::format("layer {} {}", i, what), t);
    };
    add("input", saved.norm1.sum_TD);
    add("attention norm output", saved.n1_TD);
    add("attention q, k, v", saved.attention.qkv_TC);
    add("attention output", saved.attention.o_THd);
    add("residual after attention", saved.norm2.sum_TD);
    add("feed-forward norm output", saved.n2_TD);
    add("router logits", saved.moe.router.logits_TE);
    add("router weights", saved.moe.router.route.weight_TK);
    add("MLP pre-activation", saved.mlp.h_T2F);
    add("shared expert pre-activation", saved.moe.shared.h_T2F);
  }
  kept.emplace_back("final residual", saved_final_.sum_TD);
  kept.emplace_back("final norm output", final_TD_);
  kept.emplace_back("token loss", loss_T_);
  return kept;
}

}  // namespace moebius
