#include "model/attention/gqa.h"

#include <cmath>

#include "model/frozen.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_sink.h"
#include "ops/clamp/clamp.h"
#include "ops/qk_norm/qk_norm.h"
#include "ops/qk_norm/qk_norm_blocks.h"
#include "ops/rope/rope.h"

namespace moebius {
namespace {

// The three projections are one matrix, so that they are one product. Rows are heads, which tp splits.
ParamSpec qkv_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const int64_t tp = mesh.shape().tp, D = m.hidden_size, q = m.q_size() / tp, kv = m.kv_size() / tp;
  const auto part = [&](const char* name, int64_t rows, int64_t first_row) -> ParamPart {
    return {prefix + name, {rows, D}, first_row * D, shard_of({rows, D}, 0, mesh.place().tp, tp)};
  };
  return {.name = prefix + ".qkv_proj.weight",
          .shape = {q + 2 * kv, D},
          .dtype = dtype,
          .parts = {part(".q_proj.weight", m.q_size(), 0), part(".k_proj.weight", m.kv_size(), q),
                    part(".v_proj.weight", m.kv_size(), q + kv)},
          .init_std = static_cast<float>(m.initializer_range)};
}

ParamSpec qkv_bias_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const int64_t tp = mesh.shape().tp, q = m.q_size() / tp, kv = m.kv_size() / tp;
  const auto part = [&](const char* name, int64_t size, int64_t offset) -> ParamPart {
    return {prefix + name, {size}, offset, shard_of({size}, 0, mesh.place().tp, tp)};
  };
  return {.name = prefix + ".qkv_proj.bias",
          .shape = {q + 2 * kv},
          .dtype = dtype,
          .parts = {part(".q_proj.bias", m.q_size(), 0), part(".k_proj.bias", m.kv_size(), q),
                    part(".v_proj.bias", m.kv_size(), q + kv)},
          .init = ParamInit::zeros,
          .kind = ParamKind::bias};
}

ParamSpec o_spec(const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const std::string name = prefix + ".o_proj.weight";
  const Shape whole{m.hidden_size, m.q_size()};
  return {.name = name,
          .shape = {m.hidden_size, m.q_size() / mesh.shape().tp},
          .dtype = dtype,
          .parts = {{name, whole, 0, shard_of(whole, 1, mesh.place().tp, mesh.shape().tp)}},
          .init_std = static_cast<float>(m.initializer_range)};
}

// Added to a rank's own rows of the sum over tp, so every rank has it whole.
ParamSpec o_bias_spec(const std::string& prefix, const ModelSpec& m, DType dtype) {
  return {.name = prefix + ".o_proj.bias",
          .shape = {m.hidden_size},
          .dtype = dtype,
          .init = ParamInit::zeros,
          .kind = ParamKind::bias,
          .grad_axis = Axis::tp_cp_dp};
}

// f32, as scores are.
ParamSpec sinks_spec(const std::string& prefix, const ModelSpec& m, const Mesh& mesh) {
  const std::string name = prefix + ".sinks";
  const Shape whole{m.num_heads};
  const ParamPart part{name, whole, 0, shard_of(whole, 0, mesh.place().tp, mesh.shape().tp)};
  return {.name = name,
          .shape = part.local_shape(),
          .parts = {part},
          .init_std = static_cast<float>(m.initializer_range),
          .kind = ParamKind::sink};
}

// Of each head alike, which all ranks have whole; or of all heads, split as they are.
ParamSpec norm_spec(const std::string& name, int64_t heads, const ModelSpec& m, DType dtype, const Mesh& mesh) {
  const bool whole = m.qk_norm == QkNorm::whole;
  const Shape shape{whole ? heads * m.head_dim : m.head_dim};
  const ParamPart part{name, shape, 0, whole ? shard_of(shape, 0, mesh.place().tp, mesh.shape().tp) : Shard{}};
  return {.name = name,
          .shape = part.local_shape(),
          .dtype = dtype,
          .parts = {part},
          .init = ParamInit::ones,
          .kind = ParamKind::norm,
          .grad_axis = whole ? Axis::dp_cp : Axis::tp_cp_dp};
}

}  // namespace

Gqa::Gqa(ParamTable& params, const std::string& prefix, const ModelSpec& m, int64_t window, DType dtype,
         const Mesh& mesh, CpComm cp_comm, const Tensor& rope_table_Pd)
    : tp_(mesh.shape().tp),
      H_(div_exact(m.num_heads, tp_, "attention: query heads over parallel.tp")),
      G_(div_exact(m.num_kv_heads, tp_, "attention: kv heads over parallel.tp")),
      d_(m.head_dim),
      window_(window),
      scale_(1.0f / std::sqrt(static_cast<float>(m.head_dim))),
      eps_(static_cast<float>(m.rms_norm_eps)),
      clip_(static_cast<float>(m.clip_qkv)),
      dtype_(dtype),
      tp_group_(mesh.group(Axis::tp)),
      qkv_(params, qkv_spec(prefix, m, dtype, mesh), mesh),
      o_(params, o_spec(prefix, m, dtype, mesh), mesh),
      context_parallel_(
          make_context_parallel(cp_comm, mesh, {.heads = H_, .kv_heads = G_, .window = window_, .scale = scale_})),
      qk_norm_(m.qk_norm),
      rope_table_Pd_(rope_table_Pd) {
  if (m.qkv_bias) qkv_bias_.emplace(params, qkv_bias_spec(prefix, m, dtype, mesh));
  if (m.o_bias) o_bias_.emplace(params, o_bias_spec(prefix, m, dtype));
  if (m.attention_sinks) sinks_ = &params.declare(sinks_spec(prefix, m, mesh));
  if (qk_norm_ == QkNorm::none) return;
  q_norm_ = &params.declare(norm_spec(prefix + ".q_norm.weight", m.num_heads, m, dtype, mesh));
  k_norm_ = &params.declare(norm_spec(prefix + ".k_norm.weight", m.num_kv_heads, m, dtype, mesh));
}

void Gqa::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const {
  const int64_t T = tokens * tp_;
  saved.qkv_TC.declare(plan, prefix + ".qkv", {T, (H_ + 2 * G_) * d_}, dtype_, &RecomputeSpec::qkv);
  saved.o_THd.declare(plan, prefix + ".o", {T, H_, d_}, dtype_, &RecomputeSpec::attention);
  saved.lse_TH.declare(plan, prefix + ".lse", {T, H_}, DType::f32, &RecomputeSpec::attention);
}

Qkv Gqa::take_qkv(Step& step, int64_t T) const {
  return {step.alloc({T, H_, d_}, dtype_), step.alloc({T, G_, d_}, dtype_), step.alloc({T, G_, d_}, dtype_),
          sinks_ ? sinks_->w : Tensor{}};
}

void Gqa::project(Step& step, Tensor qkv_TC, Tensor x_tD) const {
  qkv_.forward(step, qkv_TC, x_tD);
  if (qkv_bias_) qkv_bias_->forward(step, qkv_TC);
}

void Gqa::split_and_rotate(Step& step, const Qkv& out, Tensor qkv_TC) const {
  const int64_t T = qkv_TC.dim(0);
  StackScope scope(step.stack);
  Tensor in_TC = normed(step, qkv_TC);
  if (clip_ > 0) {
    const Tensor clipped_TC = qk_norm_ == QkNorm::whole ? in_TC : step.alloc(qkv_TC.shape, dtype_);
    clamp_fwd(step.stream, {.y = clipped_TC, .x = in_TC, .limit = clip_});
    in_TC = clipped_TC;
  }
  const bool per_head = qk_norm_ == QkNorm::per_head;
  rope_fwd(step.stream, {.q_THd = out.q_THd,
                         .k_TGd = out.k_TGd,
                         .v_TGd = out.v_TGd,
                         .qkv_TC = in_TC,
                         .pos_T = step.batch.pos_T.rows(0, T),
                         .cos_sin_Pd = rope_table_Pd_,
                         .q_norm_d = per_head ? q_norm_->w : Tensor{},
                         .k_norm_d = per_head ? k_norm_->w : Tensor{},
                         .eps = eps_});
}

void Gqa::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  const int64_t T = x_tD.dim(0) * tp_;
  saved.x_tD = x_tD;
  StackScope scope(step.stack);
  saved.qkv_TC.open(step.stack);
  project(step, saved.qkv_TC.rows(0, T), x_tD);
  saved.o_THd.open(step.stack);
  saved.lse_TH.open(step.stack);
  attend(step, saved, T);
  output(step, y_tD, saved);
}

void Gqa::attend(Step& step, Saved& saved, int64_t T) const {
  StackScope scope(step.stack);
  const Qkv r = take_qkv(step, T);
  split_and_rotate(step, r, saved.qkv_TC.rows(0, T));
  context_parallel_->forward(step, saved.o_THd.rows(0, T), saved.lse_TH.rows(0, T), r);
}

void Gqa::output(Step& step, Tensor y_tD, const Saved& saved) const {
  const int64_t T = y_tD.dim(0) * tp_;
  o_.forward(step, y_tD, saved.o_THd.rows(0, T).view({T, H_ * d_}));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

void Gqa::remake(Step& step, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  saved.qkv_TC.remake(step.stack, [&] { project(step, saved.qkv_TC, x_tD); });
  saved.o_THd.remake(step.stack, [&] {
    saved.lse_TH.open(step.stack);
    attend(step, saved, x_tD.dim(0) * tp_);
  });
}

void Gqa::backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const {
  const int64_t T = dy_tD.dim(0) * tp_;
  const Tensor qkv_TC = saved.qkv_TC.rows(0, T);
  saved.dy_tD = dy_tD;
  saved.dy_TD = o_.gather(step, dy_tD);
  saved.dqkv_TC = step.alloc(qkv_TC.shape, dtype_);

  StackScope scope(step.stack);
  const Tensor do_THd = step.alloc({T, H_, d_}, dtype_);
  o_.backward_input(step, do_THd.view({T, H_ * d_}), saved.dy_TD);
  const Qkv r = take_qkv(step, T);
  Qkv dr = take_qkv(step, T);
  if (sinks_) dr.sink_H = gradient_or_scratch(step, *sinks_);
  split_and_rotate(step, r, qkv_TC);
  context_parallel_->backward(step, dr, do_THd, saved.o_THd.rows(0, T), saved.lse_TH.rows(0, T), r);
  rotate_bwd(step, saved.dqkv_TC, dr, qkv_TC);
  qkv_.backward_input(step, dx_tD, saved.dqkv_TC);
}

void Gqa::rotate_bwd(Step& step, Tensor dqkv_TC, const Qkv& grads, Tensor qkv_TC) const {
  const int64_t T = qkv_TC.dim(0);
  StackScope scope(step.stack);
  const bool whole = qk_norm_ == QkNorm::whole;
  RopeBwd rope{.dqkv_TC = whole ? step.alloc(qkv_TC.shape, dtype_) : dqkv_TC,
               .dq_THd = grads.q_THd,
               .dk_TGd = grads.k_TGd,
               .dv_TGd = grads.v_TGd,
               .qkv_TC = qkv_TC,
               .pos_T = step.batch.pos_T.rows(0, T),
               .cos_sin_Pd = rope_table_Pd_,
               .eps = eps_};
  if (qk_norm_ == QkNorm::per_head) {
    rope.dq_norm_d = gradient_or_scratch(step, *q_norm_);
    rope.dk_norm_d = gradient_or_scratch(step, *k_norm_);
    rope.q_norm_d = q_norm_->w;
    rope.k_norm_d = k_norm_->w;
    rope.partial_P2d = step.alloc({RopeBwd::num_partials(T, step.stream), 2 * d_}, DType::f32);
  }
  rope_bwd(step.stream, rope);
  // Which elements were clipped is seen in what they were, made once more: the product is all that is kept.
  if (clip_ > 0)
    clamp_bwd(step.stream, {.dx = rope.dqkv_TC, .dy = rope.dqkv_TC, .x = normed(step, qkv_TC), .limit = clip_});
  if (whole) whole_norm_bwd(step, dqkv_TC, rope.dqkv_TC, qkv_TC);
}

Tensor Gqa::normed(Step& step, Tensor qkv_TC) const {
  if (qk_norm_ != QkNorm::whole) return qkv_TC;
  const Tensor normed_TC = step.alloc(qkv_TC.shape, dtype_);
  whole_norm(step, normed_TC, qkv_TC);
  return normed_TC;
}

void Gqa::whole_norm(Step& step, Tensor normed_TC, Tensor qkv_TC) const {
  if (tp_ == 1) {
    return qk_norm_fwd(
        step.stream, {.y_TC = normed_TC, .x_TC = qkv_TC, .q_norm_A = q_norm_->w, .k_norm_B = k_norm_->w, .eps = eps_});
  }
  StackScope scope(step.stack);
  const Tensor sums_T2 = step.alloc({qkv_TC.dim(0), 2}, DType::f32);
  qk_norm_sums(step.stream, {.sums_TS = sums_T2, .x_TC = qkv_TC, .q_norm_A = q_norm_->w, .k_norm_B = k_norm_->w});
  tp_group_.all_reduce_sum(step.stream, sums_T2);
  qk_norm_block_fwd(step.stream, {.y_TC = normed_TC,
                                  .x_TC = qkv_TC,
                                  .q_norm_A = q_norm_->w,
                                  .k_norm_B = k_norm_->w,
                                  .sums_T2 = sums_T2,
                                  .num_ranks = tp_,
                                  .eps = eps_});
}

void Gqa::whole_norm_bwd(Step& step, Tensor dqkv_TC, Tensor dnormed_TC, Tensor qkv_TC) const {
  if (tp_ > 1) return whole_norm_block_bwd(step, dqkv_TC, dnormed_TC, qkv_TC);
  const int64_t A = H_ * d_, B = G_ * d_, P = QkNormBwd::num_partials(qkv_TC.dim(0), A, B, step.stream);
  const Tensor partial_PW = step.alloc({P, A + B}, DType::f32);
  qk_norm_bwd(step.stream, {.dx_TC = dqkv_TC,
                            .dq_norm_A = gradient_or_scratch(step, *q_norm_),
                            .dk_norm_B = gradient_or_scratch(step, *k_norm_),
                            .partial_PW = partial_PW,
                            .dy_TC = dnormed_TC,
                            .x_TC = qkv_TC,
                            .q_norm_A = q_norm_->w,
                            .k_norm_B = k_norm_->w,
                            .eps = eps_});
}

void Gqa::whole_norm_block_bwd(Step& step, Tensor dqkv_TC, Tensor dnormed_TC, Tensor qkv_TC) const {
  const Tensor sums_T4 = step.alloc({qkv_TC.dim(0), 4}, DType::f32);
  qk_norm_sums(
      step.stream,
      {.sums_TS = sums_T4, .x_TC = qkv_TC, .q_norm_A = q_norm_->w, .k_norm_B = k_norm_->w, .dy_TC = dnormed_TC});
  tp_group_.all_reduce_sum(step.stream, sums_T4);
  qk_norm_block_bwd(step.stream, {.dx_TC = dqkv_TC,
                                  .dq_norm_A = gradient_or_scratch(step, *q_norm_),
                                  .dk_norm_B = gradient_or_scratch(step, *k_norm_),
                                  .dy_TC = dnormed_TC,
                                  .x_TC = qkv_TC,
                                  .q_norm_A = q_norm_->w,
                                  .k_norm_B = k_norm_->w,
                                  .sums_T4 = sums_T4,
                                  .num_ranks = tp_,
                                  .eps = eps_});
}

void Gqa::backward_weight(Step& step, const Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  o_.backward_weight(step, saved.dy_TD, saved.o_THd.rows(0, T).view({T, H_ * d_}));
  qkv_.backward_weight(step, saved.dqkv_TC, saved.x_tD);
  if (qkv_bias_) qkv_bias_->backward_weight(step, saved.dqkv_TC);
  if (o_bias_) o_bias_->backward_weight(step, saved.dy_tD);
}

void Gqa::declare_cache(MemoryPlan& plan, const std::string& prefix, const ModelSpec& m, DType dtype, int64_t tp,
                        int64_t max_tokens, KvCache& cache) {
  const Shape shape{max_tokens, m.num_kv_heads / tp, m.head_dim};
  plan.declare(cache.k_UGd, prefix + ".k_cache", shape, dtype, Life::saved);
  plan.declare(cache.v_UGd, prefix + ".v_cache", shape, dtype, Life::saved);
}

void Gqa::forward_cached(Step& step, Tensor y_tD, Tensor x_tD, const KvCache& cache, int64_t first) const {
  const int64_t T = x_tD.dim(0) * tp_;
  StackScope scope(step.stack);
  const Tensor qkv_TC = step.alloc({T, (H_ + 2 * G_) * d_}, dtype_), o_THd = step.alloc({T, H_, d_}, dtype_);
  project(step, qkv_TC, x_tD);
  const Qkv r{step.alloc({T, H_, d_}, dtype_), cache.k_UGd.rows(first, first + T), cache.v_UGd.rows(first, first + T)};
  split_and_rotate(step, r, qkv_TC);
  AttentionFwd attention{.o_THd = o_THd,
                         .lse_TH = step.alloc({T, H_}, DType::f32),
                         .q_THd = r.q_THd,
                         .k_UGd = cache.k_UGd.rows(0, first + T),
                         .v_UGd = cache.v_UGd.rows(0, first + T),
                         .window = window_,
                         .scale = scale_};
  attention.scratch = step.alloc_bytes(AttentionFwd::scratch_bytes(attention, step.stream));
  attention_fwd(step.stream, attention);
  if (sinks_) attention_sink_fwd(step.stream, {.o_THd = o_THd, .lse_TH = attention.lse_TH, .sink_H = sinks_->w});
  o_.forward(step, y_tD, o_THd.view({T, H_ * d_}));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

}  // namespace moebius
