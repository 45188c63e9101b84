#include "model/attention/gqa.h"

#include <cmath>

#include "model/attention/gqa_params.h"
#include "model/attention/max_logits.h"
#include "model/frozen.h"
#include "model/layers/row_chunks.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"
#include "ops/attention/attention_sink.h"
#include "ops/attention/cached_attention.h"
#include "ops/clamp/clamp.h"
#include "ops/elementwise/elementwise.h"
#include "ops/one_token/one_token.h"
#include "ops/qk_norm/qk_norm_blocks.h"
#include "ops/rope/rope.h"

namespace moebius {

namespace {

// Biases are scaled as the rows of their projections. Heads whose projections are frozen are not clipped.
const Tensor* max_logits_of(const LayerContext& c, const Param& qkv, const std::string& prefix) {
  if (!c.max_logits || !qkv.has_grad) return nullptr;
  const int64_t tp = c.mesh.shape().tp, d = c.model.head_dim;
  MaxLogits::Layer layer{.heads = c.model.num_heads / tp, .kv_group = c.model.num_heads / c.model.num_kv_heads};
  for (const char* kind : {".weight", ".bias"}) {
    if (kind == std::string_view(".bias") && !c.model.qkv_bias) continue;
    layer.matrices.push_back({.part = prefix + ".q_proj" + kind, .head_rows = d, .root_rows = d});
    layer.matrices.push_back({.part = prefix + ".k_proj" + kind, .head_rows = d, .root_rows = d, .of_keys = true});
  }
  return c.max_logits->declare(prefix, std::move(layer));
}

}  // namespace

Gqa::Gqa(const LayerContext& c, const std::string& prefix, int64_t window)
    : tp_(c.mesh.shape().tp),
      T_(c.shape.tokens()),
      H_(div_exact(c.model.num_heads, tp_, "attention: query heads over parallel.tp")),
      G_(div_exact(c.model.num_kv_heads, tp_, "attention: kv heads over parallel.tp")),
      d_(c.model.head_dim),
      window_(window),
      is_long_(is_long_sequence(c)),
      scale_(1.0f / std::sqrt(static_cast<float>(c.model.head_dim))),
      eps_(c.norm_eps()),
      clip_(static_cast<float>(c.model.clip_qkv)),
      dtype_(c.dtype),
      kernels_(c.kernels),
      tp_group_(c.mesh.group(Axis::tp)),
      qkv_(c, qkv_spec(c, prefix)),
      o_(c, o_spec(c, prefix)),
      context_parallel_(make_context_parallel(window > 0 ? c.shape.cp_comm_window : c.shape.cp_comm, c.mesh,
                                              {.heads = H_,
                                               .kv_heads = G_,
                                               .window = window_,
                                               .scale = scale_,
                                               .kernels = c.kernels,
                                               .max_logits = max_logits_of(c, qkv_.param(), prefix)})),
      qk_norm_(c.model.qk_norm),
      norms_in_rope_(norms_in_rope(c.model, tp_)),
      norms_first_(qk_norm_ != QkNorm::none && !norms_in_rope_),
      rope_table_Pd_(c.rope_table_Pd) {
  section_G_ = kv_heads_of_section(c);
  has_forward_sections_ = section_G_ < G_ && (c.mesh.shape().cp > 1 || is_long_sequence(c, 2));
  if (c.model.qkv_bias) qkv_bias_.emplace(c.params, qkv_bias_spec(c, prefix));
  if (c.model.o_bias) o_bias_.emplace(c.params, o_bias_spec(c, prefix));
  if (c.model.attention_sinks) sinks_ = &c.params.declare(sinks_spec(c, prefix));
  if (qk_norm_ == QkNorm::none) return;
  q_norm_ = &c.params.declare(qk_norm_spec(c, prefix + ".q_norm.weight", c.model.num_heads));
  k_norm_ = &c.params.declare(qk_norm_spec(c, prefix + ".k_norm.weight", c.model.num_kv_heads));
}

void Gqa::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  const int64_t C = (H_ + 2 * G_) * d_, D = o_.param().w.dim(0);
  saved.weights_follow = !plan.splits_backward();
  saved.qkv_TC.declare(plan, prefix + ".qkv", {T_, C}, dtype_, &RecomputeSpec::qkv);
  saved.o_THd.declare(plan, prefix + ".o", {T_, H_, d_}, dtype_, &RecomputeSpec::attention);
  saved.lse_TH.declare(plan, prefix + ".lse", {T_, H_}, DType::f32, &RecomputeSpec::attention);
  saved.dy_TD.declare(plan, prefix + ".dy", {T_, D}, dtype_);
  saved.dqkv_TC.declare(plan, prefix + ".dqkv", {T_, C}, dtype_);
  saved.qkv_rows.declare(plan, prefix + ".qkv", qkv_.linear().adapter(), T_, dtype_);
  saved.o_rows.declare(plan, prefix + ".o", o_.linear().adapter(), T_, dtype_);
  if (o_bias_) saved.dy_tD.declare(plan, prefix + ".own_dy", {T_ / tp_, D}, dtype_);
}

Qkv Gqa::alloc_qkv(Step& step, int64_t T, int64_t kv_heads) const {
  return {step.alloc({T, heads_of(kv_heads), d_}, dtype_), step.alloc({T, kv_heads, d_}, dtype_),
          step.alloc({T, kv_heads, d_}, dtype_), sinks_ ? sinks_->w : Tensor{}};
}

Qkv Gqa::qkv_in(Step& step, Tensor buffer_TC) const {
  const int64_t T = buffer_TC.dim(0), q = T * H_ * d_, k = T * G_ * d_, aligned = StepStack::kAlign / size_of(dtype_);
  if (q % aligned != 0 || k % aligned != 0) return alloc_qkv(step, T);
  const Tensor buffer = buffer_TC.view({q + 2 * k});
  return {buffer.rows(0, q).view({T, H_, d_}), buffer.rows(q, q + k).view({T, G_, d_}),
          buffer.rows(q + k, q + 2 * k).view({T, G_, d_}), sinks_ ? sinks_->w : Tensor{}};
}

void Gqa::project(Step& step, Tensor qkv_TC, Tensor x_tD, Tensor low_TL) const {
  qkv_.forward(step, qkv_TC, x_tD, qkv_bias_ ? qkv_bias_->all() : Tensor{}, {.low = low_TL});
}

void Gqa::project_normed(Step& step, Tensor qkv_TC, const RmsNormFwd& norm) const {
  const Linear& linear = qkv_.linear();
  const Tensor& w = linear.param().w;
  if (tp_ == 1 && qkv_TC.dim(0) == 1 && !linear.is_quantised() && !linear.has_adapter() && w.dtype == dtype_) {
    const Tensor bias = qkv_bias_ ? qkv_bias_->all() : Tensor{};
    return norm_gemm(step.stream, {.c_TN = qkv_TC, .norm = norm, .w_ND = w, .bias_N = bias});
  }
  rms_norm_fwd(step.stream, norm);
  project(step, qkv_TC, norm.y_TD);
}

void Gqa::split_and_rotate(Step& step, const Qkv& out, Tensor qkv_TC) const {
  StackScope scope(step.stack);
  Tensor in_TC = normed(step, qkv_TC);
  if (clip_ > 0) {
    const Tensor clipped_TC = norms_first_ ? in_TC : step.alloc(qkv_TC.shape, dtype_);
    clamp_fwd(step.stream, {.y = clipped_TC, .x = in_TC, .limit = clip_});
    in_TC = clipped_TC;
  }
  rope_fwd(step.stream, rotation(step, out, in_TC));
}

RopeFwd Gqa::rotation(const Step& step, const Qkv& out, Tensor in_TC) const {
  return {.q_THd = out.q_THd,
          .k_TGd = out.k_TGd,
          .v_TGd = out.v_TGd,
          .qkv_TC = in_TC,
          .pos_T = step.batch.pos_T.rows(0, in_TC.dim(0)),
          .cos_sin_Pd = rope_table_Pd_,
          .q_norm_A = norms_in_rope_ ? q_norm_->w : Tensor{},
          .k_norm_B = norms_in_rope_ ? k_norm_->w : Tensor{},
          .eps = eps_};
}

void Gqa::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  const int64_t T = x_tD.dim(0) * tp_;
  saved.x_tD = x_tD;
  StackScope scope(step.stack);
  saved.qkv_TC.open(step.stack);
  project(step, saved.qkv_TC.rows(0, T), x_tD, saved.qkv_rows.low(T));
  saved.o_THd.open(step.stack);
  saved.lse_TH.open(step.stack);
  attend(step, saved, T);
  output(step, y_tD, saved);
}

void Gqa::attend(Step& step, Saved& saved, int64_t T) const {
  if (has_forward_sections_) return attend_in_sections(step, saved, T);
  StackScope scope(step.stack);
  Qkv r = alloc_qkv(step, T);
  r.doc_start_T = step.batch.attention_starts(T);
  split_and_rotate(step, r, saved.qkv_TC.rows(0, T));
  context_parallel_->forward(step, saved.o_THd.rows(0, T), saved.lse_TH.rows(0, T), r);
}

void Gqa::output(Step& step, Tensor y_tD, const Saved& saved) const {
  const int64_t T = y_tD.dim(0) * tp_;
  o_.forward(step, y_tD, saved.o_THd.rows(0, T).view({T, H_ * d_}), o_bias_ ? o_bias_->all() : Tensor{},
             {.low = saved.o_rows.low(T)});
}

void Gqa::recompute(Step& step, const Attention::Input& x, Saved& saved) const {
  if (holds_input(saved)) {
    saved.x_tD = x();
    saved.qkv_TC.recompute(step.stack, [&] { project(step, saved.qkv_TC, saved.x_tD, saved.qkv_rows.low(T_)); });
  }
  saved.o_THd.recompute(step.stack, [&] {
    saved.lse_TH.open(step.stack);
    StackScope scope(step.stack);
    project_again(step, x, saved);
    attend(step, saved, T_);
  });
}

void Gqa::project_again(Step& step, const Attention::Input& x, Saved& saved) const {
  if (!is_long_) return;
  saved.qkv_TC.recompute(step.stack, [&] {
    StackScope scope(step.stack);
    project(step, saved.qkv_TC, x(), saved.qkv_rows.low(T_));
  });
}

// dx is allocated when the tensors of attend_bwd() are free again: those are the largest of a long sequence.
Attention::InputGradient Gqa::backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx,
                                             const Attention::Input& x) const {
  const int64_t T = dy_tD.dim(0) * tp_;
  if (o_bias_) saved.dy_tD.hold(step.stream, dy_tD);
  saved.dy_TD.hold(step.stream, o_.gather(step, dy_tD));
  saved.dqkv_TC.open(step.stack);
  saved.o_rows.open(step.stack, /*has_dx=*/true);
  saved.qkv_rows.open(step.stack, /*has_dx=*/with_dx);
  attend_bwd(step, saved, T, x);
  if (!with_dx) return {};
  const Tensor dx_tD = step.alloc(dy_tD.shape, dtype_);
  const Linear::Low low{.dlow = saved.qkv_rows.dlow(T)};
  if (saved.weights_follow) return {dx_tD, qkv_.start_backward_input(step, dx_tD, saved.dqkv_TC, low)};
  qkv_.backward_input(step, dx_tD, saved.dqkv_TC, /*accumulate=*/false, low);
  return {dx_tD};
}

void Gqa::attend_bwd(Step& step, Saved& saved, int64_t T, const Attention::Input& x) const {
  if (section_G_ < G_) return attend_bwd_in_sections(step, saved, T, x);
  StackScope scope(step.stack);
  Qkv r = qkv_in(step, saved.dqkv_TC);  // dqkv is written after r has been read
  r.doc_start_T = step.batch.attention_starts(T);
  {
    StackScope projected(step.stack);
    project_again(step, x, saved);
    split_and_rotate(step, r, saved.qkv_TC.rows(0, T));
  }
  Qkv dr = alloc_qkv(step, T);
  if (sinks_) dr.sink_H = gradient_or_scratch(step, *sinks_);
  {
    StackScope attention(step.stack);
    const Tensor do_THd = step.alloc({T, H_, d_}, dtype_);
    const auto compute_do = [&] {
      o_.backward_input(step, do_THd.view({T, H_ * d_}), saved.dy_TD, {.dlow = saved.o_rows.dlow(T)});
    };
    context_parallel_->backward(step, {.grads = dr,
                                       .do_THd = do_THd,
                                       .o_THd = saved.o_THd.rows(0, T),
                                       .lse_TH = saved.lse_TH.rows(0, T),
                                       .in = r,
                                       .compute_do = compute_do});
  }
  project_again(step, x, saved);
  rotate_bwd(step, saved.dqkv_TC, dr, saved.qkv_TC.rows(0, T));
}

void Gqa::rotate_bwd(Step& step, Tensor dqkv_TC, const Qkv& grads, Tensor qkv_TC) const {
  const int64_t T = qkv_TC.dim(0);
  StackScope scope(step.stack);
  RopeBwd rope{.dqkv_TC = dqkv_TC,
               .dq_THd = grads.q_THd,
               .dk_TGd = grads.k_TGd,
               .dv_TGd = grads.v_TGd,
               .qkv_TC = qkv_TC,
               .pos_T = step.batch.pos_T.rows(0, T),
               .cos_sin_Pd = rope_table_Pd_,
               .eps = eps_};
  if (norms_in_rope_) {
    rope.dq_norm_A = gradient_or_scratch(step, *q_norm_);
    rope.dk_norm_B = gradient_or_scratch(step, *k_norm_);
    rope.q_norm_A = q_norm_->w;
    rope.k_norm_B = k_norm_->w;
    const int64_t width = q_norm_->w.numel() + k_norm_->w.numel();
    rope.partial_PW = step.alloc({RopeBwd::num_partials(rope, step.stream), width}, DType::f32);
  }
  rope_bwd(step.stream, rope);
  // The values before clipping show which elements were clipped. They are recomputed, since only
  // the product is kept.
  if (clip_ > 0) {
    StackScope clipped(step.stack);
    clamp_bwd(step.stream, {.dx = dqkv_TC, .dy = dqkv_TC, .x = normed(step, qkv_TC), .limit = clip_});
  }
  if (norms_first_) norm_first_bwd(step, dqkv_TC, qkv_TC);
}

Tensor Gqa::normed(Step& step, Tensor qkv_TC) const {
  if (!norms_first_) return qkv_TC;
  const Tensor normed_TC = step.alloc(qkv_TC.shape, dtype_);
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
  return normed_TC;
}

void Gqa::norm_first_bwd(Step& step, Tensor dqkv_TC, Tensor qkv_TC) const {
  const Tensor sums_T4 = step.alloc({qkv_TC.dim(0), 4}, DType::f32);
  qk_norm_sums(step.stream,
               {.sums_TS = sums_T4, .x_TC = qkv_TC, .q_norm_A = q_norm_->w, .k_norm_B = k_norm_->w, .dy_TC = dqkv_TC});
  tp_group_.all_reduce_sum(step.stream, sums_T4);
  qk_norm_block_bwd(step.stream, {.dx_TC = dqkv_TC,
                                  .dq_norm_A = gradient_or_scratch(step, *q_norm_),
                                  .dk_norm_B = gradient_or_scratch(step, *k_norm_),
                                  .x_TC = qkv_TC,
                                  .q_norm_A = q_norm_->w,
                                  .k_norm_B = k_norm_->w,
                                  .sums_T4 = sums_T4,
                                  .num_ranks = tp_,
                                  .eps = eps_});
}

void Gqa::backward_weight(Step& step, const Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  StackScope scope(step.stack);
  RowBlocks::Gathering x = qkv_.start_gather(step, saved.x_tD);
  o_.backward_weight(step, saved.dy_TD, saved.o_THd.rows(0, T).view({T, H_ * d_}),
                     {.low = saved.o_rows.low(T), .dlow = saved.o_rows.dlow(T)});
  qkv_.backward_weight(step, saved.dqkv_TC, std::move(x),
                       {.low = saved.qkv_rows.low(T), .dlow = saved.qkv_rows.dlow(T)});
  if (qkv_bias_) qkv_bias_->backward_weight(step, saved.dqkv_TC);
  if (o_bias_) o_bias_->backward_weight(step, saved.dy_tD);
}

void Gqa::declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const {
  const Shape shape{num_tokens, G_, d_};
  plan.declare(cache.k_UGd, prefix + ".k_cache", shape, dtype_, Life::saved);
  plan.declare(cache.v_UGd, prefix + ".v_cache", shape, dtype_, Life::saved);
}

std::vector<KeptTensor> Gqa::kept(const Saved& saved) {
  return {{"attention q, k, v", saved.qkv_TC.kept()}, {"attention output", saved.o_THd.kept()}};
}

void Gqa::attend_cached(Step& step, Tensor o_THd, Tensor q_THd, Tensor k_UGd, Tensor v_UGd) const {
  StackScope scope(step.stack);
  AttentionFwd attention{.o_THd = o_THd,
                         .lse_TH = step.alloc({q_THd.dim(0), H_}, DType::f32),
                         .q_THd = q_THd,
                         .k_UGd = k_UGd,
                         .v_UGd = v_UGd,
                         .window = window_,
                         .scale = scale_};
  attention.scratch = step.alloc_bytes(planned_scratch_bytes(attention, step.stream, kernels_));
  attention_fwd(step.stream, attention);
  if (sinks_) attention_sink_fwd(step.stream, {.o_THd = o_THd, .lse_TH = attention.lse_TH, .sink_H = sinks_->w});
}

void Gqa::attend_single(Step& step, Tensor o_THd, const Qkv& r, const KvCache& cache, int64_t max_tokens,
                        Tensor qkv_TC) const {
  const int64_t T = o_THd.dim(0);
  StackScope scope(step.stack);
  CachedAttentionFwd attention{.o_NHd = o_THd,
                               .lse_NH = step.alloc({T, H_}, DType::f32),
                               .k_UGd = cache.k_UGd,
                               .v_UGd = cache.v_UGd,
                               .q_NHd = r.q_THd,
                               .k_NGd = r.k_TGd,
                               .v_NGd = r.v_TGd,
                               .pos_N = step.batch.pos_T.rows(0, T),
                               .sequence_N = step.batch.segment_T.rows(0, T),
                               .max_tokens = max_tokens,
                               .window = window_,
                               .scale = scale_};
  attention.scratch = step.alloc_bytes(CachedAttentionFwd::scratch_bytes(attention, step.stream));
  if (qkv_TC.empty())
    cached_attention_fwd(step.stream, attention);
  else
    rotated_attention(step.stream, {.attention = attention, .rope = rotation(step, r, qkv_TC)});
  if (sinks_) attention_sink_fwd(step.stream, {.o_THd = o_THd, .lse_TH = attention.lse_NH, .sink_H = sinks_->w});
}

void Gqa::forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                         const CachedRows& rows) const {
  const int64_t T = y_tD.dim(0) * tp_;
  StackScope scope(step.stack);
  const Tensor qkv_TC = step.alloc({T, (H_ + 2 * G_) * d_}, dtype_), o_THd = step.alloc({T, H_, d_}, dtype_);
  project_normed(step, qkv_TC, norm);
  const Qkv r = alloc_qkv(step, T);
  // One kernel may rotate the rows of one token and compute its attention.
  const bool rotates_later = T == 1 && rows.are_single() && qk_norm_ != QkNorm::whole && clip_ == 0;
  if (!rotates_later) split_and_rotate(step, r, qkv_TC);
  if (rows.are_single()) attend_single(step, o_THd, r, cache, rows.max_tokens, rotates_later ? qkv_TC : Tensor{});
  int64_t row = 0;
  for (const CachedRun& run : rows.are_single() ? std::span<const CachedRun>{} : rows.runs) {
    const int64_t begin = run.sequence * rows.max_tokens, at = begin + run.first, end = at + run.count,
                  last = row + run.count;
    copy(step.stream, cache.k_UGd.rows(at, end), r.k_TGd.rows(row, last));
    copy(step.stream, cache.v_UGd.rows(at, end), r.v_TGd.rows(row, last));
    attend_cached(step, o_THd.rows(row, last), r.q_THd.rows(row, last), cache.k_UGd.rows(begin, end),
                  cache.v_UGd.rows(begin, end));
    row = last;
  }
  o_.forward(step, y_tD, o_THd.view({T, H_ * d_}), o_bias_ ? o_bias_->all() : Tensor{});
}

}  // namespace moebius
