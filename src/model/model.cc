#include "model/model.h"

#include <algorithm>

#include "model/rope_frequencies.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/rope/rope.h"
#include "ops/vocab/vocab.h"

namespace moebius {
namespace {

ParamSpec table_spec(const char* name, const ModelSpec& m, DType dtype) {
  return {.name = name,
          .shape = {m.vocab_size, m.hidden_size},
          .dtype = dtype,
          .init_std = static_cast<float>(m.initializer_range)};
}

}  // namespace

Model::Model(const ModelSpec& model, const BalanceSpec& balance, const PrecisionSpec& precision, const Mesh& mesh,
             MemoryPlan& plan, ModelUse use, const BatchShape& shape, int64_t max_positions, uint64_t seed)
    : spec_(model),
      dtype_(precision.compute),
      shape_(shape),
      mesh_(mesh),
      params_(plan, use),
      embedding_(params_.declare(table_spec("model.embed_tokens.weight", model, dtype_))),
      blocks_([&] {
        std::deque<Block> blocks;
        for (int64_t i = 0; i < model.num_layers; ++i) {
          blocks.emplace_back(params_, plan, model, balance, dtype_, mesh, shape, rope_table_Pd_, i, seed);
        }
        return blocks;
      }()),
      final_norm_(params_, "model.norm.weight", model.hidden_size, dtype_, static_cast<float>(model.rms_norm_eps)),
      head_(model.tie_word_embeddings ? embedding_ : params_.declare(table_spec("lm_head.weight", model, dtype_))),
      saved_(use == ModelUse::inference ? 1 : model.num_layers) {
  const int64_t T = shape.tokens(), D = model.hidden_size;
  plan.declare(rope_table_Pd_, "rope_table", {max_positions, model.rope_dim()}, DType::f32, Life::state);
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
  plan.declare(loss_T_, "loss", {T}, DType::f32, Life::saved);
  plan.declare(loss_sum_1_, "loss_sum", {1}, DType::f64, Life::metrics);
}

void Model::init_state(Stream& s) const {
  const RopeFrequencies rope = rope_frequencies(spec_);
  rope_table(s, {.cos_sin_Pd = rope_table_Pd_,
                 .theta = spec_.rope_theta,
                 .frequencies = rope.values,
                 .magnitude = rope.magnitude});
  for (const Block& block : blocks_) {
    if (block.moe()) block.moe()->router().init_state(s);
  }
}

void Model::forward_hidden(Step& step, int64_t T) {
  StackScope scope(step.stack);
  Residual residual{.delta_TD = step.take({T, spec_.hidden_size}, dtype_)};
  embedding_fwd(step.stream,
                {.x_TD = residual.delta_TD, .token_T = step.batch.token_T.rows(0, T), .w_VD = embedding_.w});
  for (size_t i = 0; i < blocks_.size(); ++i) {
    PhaseScope phase(step.stream, "forward", static_cast<int64_t>(i));
    blocks_[i].forward(step, residual, saved_of(i));
  }
  final_norm_.forward(step, final_TD_.rows(0, T), residual.delta_TD, residual.base_TD, saved_final_);
}

void Model::forward_loss(Step& step, bool with_gradients) {
  StackScope scope(step.stack);
  const int64_t C = LmLoss::chunk(shape_.tokens(), spec_.vocab_size, step.stream);
  LmLoss loss{.loss_T = loss_T_,
              .logits_CV = step.take({C, spec_.vocab_size}, DType::f32),
              .x_TD = final_TD_,
              .w_VD = head_.w,
              .target_T = step.batch.target_T,
              .weight_T = step.batch.weight_T,
              .scale_1 = step.batch.loss_scale_1,
              .scale = static_cast<float>(step.batch.loss_scale)};
  if (with_gradients) {
    loss.dx_TD = dfinal_TD_;
    loss.dw_VD = head_.dw;
    loss.dlogits_CV = step.take({C, spec_.vocab_size}, dtype_);
  }
  lm_loss(step.stream, loss);
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
  EmbeddingBwd embedding{.dw_VD = embedding_.dw, .dx_TD = dresidual_TD, .token_T = step.batch.token_T};
  embedding.scratch = step.take_bytes(EmbeddingBwd::scratch_bytes(embedding, step.stream));
  embedding_bwd(step.stream, embedding);
}

void Model::logits(Step& step, Tensor logits_CV, int64_t begin, int64_t end) const {
  gemm(step.stream, {.c_MN = logits_CV, .a = final_TD_.rows(begin, end), .b = head_.w, .trans_b = true});
}

void Model::declare_caches(MemoryPlan& plan, std::vector<KvCache>& caches, int64_t max_tokens) const {
  caches.resize(blocks_.size());
  const Shape shape{max_tokens, spec_.num_kv_heads, spec_.head_dim};
  for (size_t i = 0; i < caches.size(); ++i) {
    if (spec_.is_latent()) {
      Mla::declare_cache(plan, fmt::format("layer{}", i), spec_, dtype_, max_tokens, caches[i]);
      continue;
    }
    plan.declare(caches[i].k_UGd, fmt::format("layer{}.k_cache", i), shape, dtype_, Life::saved);
    plan.declare(caches[i].v_UGd, fmt::format("layer{}.v_cache", i), shape, dtype_, Life::saved);
  }
}

void Model::forward_cached(Step& step, std::vector<KvCache>& caches, int64_t first, int64_t T) {
  StackScope scope(step.stack);
  Residual residual{.delta_TD = step.take({T, spec_.hidden_size}, dtype_)};
  embedding_fwd(step.stream,
                {.x_TD = residual.delta_TD, .token_T = step.batch.token_T.rows(0, T), .w_VD = embedding_.w});
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
    add("query latent", saved.latent_attention.q.c_TR);
    add("key and value latent", saved.latent_attention.kv.c_TR);
    add("attention q", saved.latent_attention.q_THd);
    add("attention k, v", saved.latent_attention.kv_THw);
    add("attention output", saved.latent_attention.o_THv);
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
