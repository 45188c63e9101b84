#include "model/attention/mla.h"

#include <cmath>

#include "model/attention/max_logits.h"
#include "model/attention/mla_params.h"
#include "model/attention/rope_frequencies.h"
#include "model/frozen.h"
#include "model/layers/precision_of_rows.h"
#include "model/layers/row_chunks.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/mla.h"
#include "ops/norm/norm.h"

namespace moebius {
namespace {

constexpr float kLatentNormEps = 1e-6f;

// Returns q_a_proj if queries have a latent.
std::optional<Linear> query_down(const LayerContext& c, const std::string& prefix) {
  if (c.model.q_lora_rank == 0) return std::nullopt;
  return Linear(c, whole_matrix(c, prefix + ".q_a_proj.weight", c.model.q_lora_rank, c.model.hidden_size));
}

// The rotated keys belong to all heads, so their share of the scale is applied to queries. Heads with frozen
// projections are not clipped.
const Tensor* max_logits_of(const LayerContext& c, const Param& q, const Param& kv, const std::string& prefix) {
  if (!c.max_logits || !q.has_grad || !kv.has_grad) return nullptr;
  const int64_t nope = c.model.qk_nope_head_dim(), rope = c.model.qk_rope_head_dim;
  return c.max_logits->declare(
      prefix,
      {.heads = c.model.num_heads / c.mesh.shape().tp,
       .matrices = {
           {.part = q.spec.name, .head_rows = nope + rope, .root_rows = nope, .whole_rows = rope},
           {.part = kv.spec.name, .head_rows = nope + c.model.v_head_dim, .root_rows = nope, .of_keys = true}}});
}

Tensor as_rows(const Tensor& t_THw) { return t_THw.view({t_THw.dim(0), t_THw.dim(1) * t_THw.dim(2)}); }

}  // namespace

Mla::Latent Mla::SavedLatent::rows(int64_t t) const {
  if (c_tR.empty()) return {};
  return {c_tR.rows(0, t), rstd_t.rows(0, t), normed_tR.rows(0, t)};
}

Mla::Mla(const LayerContext& c, const std::string& prefix)
    : tp_(c.mesh.shape().tp),
      T_(c.shape.tokens()),
      H_(div_exact(c.model.num_heads, tp_, "attention: query heads over parallel.tp")),
      nope_(c.model.qk_nope_head_dim()),
      rope_(c.model.qk_rope_head_dim),
      v_(c.model.v_head_dim),
      q_rank_(c.model.q_lora_rank),
      kv_rank_(c.model.kv_lora_rank),
      scale_(static_cast<float>(attention_scale_of_rope(c.model) / std::sqrt(static_cast<double>(c.model.head_dim)))),
      interleaved_(c.model.rope_interleave),
      is_long_(is_long_sequence(c)),
      dtype_(c.dtype),
      kernels_(c.kernels),
      q_a_(query_down(c, prefix)),
      q_a_norm_(q_rank_ == 0
                    ? nullptr
                    : &c.params.declare(whole_row(c, prefix + ".q_a_layernorm.weight", q_rank_, ParamInit::ones))),
      q_b_(c, query_up(c, prefix)),
      kv_a_(c.params.declare(
          stored_first(whole_matrix(c, prefix + ".kv_a_proj_with_mqa.weight", kv_rank_ + rope_, c.model.hidden_size)))),
      kv_a_norm_(c.params.declare(whole_row(c, prefix + ".kv_a_layernorm.weight", kv_rank_, ParamInit::ones))),
      latent_precision_(precision_of_rows(c, kv_a_.spec, 0)),
      k_rope_precision_(precision_of_rows(c, kv_a_.spec, kv_rank_)),
      kv_a_rows_(c, latent_precision_),
      kv_a_adapter_(c, kv_a_.spec),
      is_inference_(c.params.use() == ModelUse::inference),
      kv_(std::make_unique<LatentKv>(
          c, heads_matrix(c, prefix + ".kv_b_proj.weight", {c.model.num_heads * (nope_ + v_), kv_rank_}, 0),
          LatentKv::Widths{nope_, rope_, v_})),
      o_(c, heads_matrix(c, prefix + ".o_proj.weight", {c.model.hidden_size, c.model.num_heads * v_}, 1)),
      rows_(c.mesh),
      context_parallel_(
          make_context_parallel(c.shape.cp_comm, c.mesh,
                                {.heads = H_,
                                 .kv_heads = H_,
                                 .scale = scale_,
                                 .kernels = c.kernels,
                                 .expansion = kv_->is_expanded_late() ? kv_.get() : nullptr,
                                 .max_logits = max_logits_of(c, q_b_.param(), kv_->w().param(), prefix)})),
      rope_table_Pr_(c.rope_table_Pd) {
  if (!c.model.o_bias) return;
  const auto bias = [&](std::optional<Bias>& b, const char* name, int64_t width) {
    b.emplace(c.params, whole_row(c, prefix + name, width, ParamInit::zeros));
  };
  if (q_a_) bias(q_a_bias_, ".q_a_proj.bias", q_rank_);
  bias(kv_a_bias_, ".kv_a_proj_with_mqa.bias", kv_rank_ + rope_);
  bias(o_bias_, ".o_proj.bias", c.model.hidden_size);
}

void Mla::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  const int64_t t = T_ / tp_, D = o_.param().w.dim(0);
  const auto latent = [&](const char* name, int64_t rank, SavedLatent& l) {
    l.c_tR.declare(plan, prefix + name, {t, rank}, dtype_, &RecomputeSpec::qkv);
    l.rstd_t.declare(plan, prefix + name + "_rstd", {t}, DType::f32, &RecomputeSpec::qkv);
    l.normed_tR.declare(plan, prefix + name + "_normed", {t, rank}, dtype_, &RecomputeSpec::mla_up_proj);
  };
  if (q_rank_ > 0) latent(".q_latent", q_rank_, saved.q);
  latent(".kv_latent", kv_rank_, saved.kv);
  saved.q_THd.declare(plan, prefix + ".q", {T_, H_, nope_ + rope_}, dtype_, &RecomputeSpec::mla_up_proj);
  if (!kv_->is_expanded_late())
    saved.kv_THw.declare(plan, prefix + ".kv", {T_, H_, nope_ + v_}, dtype_, &RecomputeSpec::mla_up_proj);
  saved.k_rope_Tr.declare(plan, prefix + ".k_rope", {T_, rope_}, dtype_, &RecomputeSpec::qkv);
  saved.o_THv.declare(plan, prefix + ".o", {T_, H_, v_}, dtype_, &RecomputeSpec::attention);
  saved.lse_TH.declare(plan, prefix + ".lse", {T_, H_}, DType::f32, &RecomputeSpec::attention);

  if (o_bias_) saved.dy_tD.declare(plan, prefix + ".own_dy", {t, D}, dtype_);
  saved.dy_TD.declare(plan, prefix + ".dy", {T_, D}, dtype_);
  saved.dq_THd.declare(plan, prefix + ".dq", {T_, H_, nope_ + rope_}, dtype_);
  if (!kv_->is_expanded_late()) saved.dkv_THw.declare(plan, prefix + ".dkv", {T_, H_, nope_ + v_}, dtype_);
  saved.dk_rope_tr.declare(plan, prefix + ".dk_rope", {t, rope_}, dtype_);
  saved.dkv_latent_tR.declare(plan, prefix + ".dkv_latent", {t, kv_rank_}, dtype_);
  if (q_a_) saved.dq_latent_tR.declare(plan, prefix + ".dq_latent", {t, q_rank_}, dtype_);
}

Tensor Mla::down_rows(const Tensor& kv_a, DownPart part) const {
  const int64_t first = first_down_row(part);
  return kv_a.rows(first, first + (part == DownPart::k_rope ? rope_ : kv_rank_));
}

void Mla::down(Step& step, Tensor y, Tensor x_tD, DownPart part) const {
  StackScope scope(step.stack);
  const QuantizeContext c = quantize_context(step);
  const ProductPrecision& precision = down_precision(part);
  const Operand x = precision.x(c, x_tD), w = precision.w(c, down_rows(kv_a_.w, part));
  gemm(step.stream, {.c_MN = y, .a = x, .b = w, .trans_b = true, .few_rows = is_inference_});
  kv_a_adapter_.forward(step, {.y = y, .x = x_tD, .first = first_down_row(part)});
}

void Mla::down_bwd_input(Step& step, Tensor dx_tD, Tensor dy, DownPart part) const {
  StackScope scope(step.stack);
  const QuantizeContext c = quantize_context(step);
  const ProductPrecision& precision = down_precision(part);
  const Operand d = precision.dy(c, dy, kv_a_rows_.groups(step, dy.dim(0))),
                w = precision.w_for_dx(c, down_rows(kv_a_.w, part));
  gemm(step.stream, {.c_MN = dx_tD, .a = d, .b = w, .accumulate = part == DownPart::k_rope});
  kv_a_adapter_.backward_input(step, {.dx = dx_tD, .dy = dy, .first = first_down_row(part)});
}

void Mla::down_bwd_weight(Step& step, Tensor dy, Tensor x_tD, DownPart part) const {
  kv_a_adapter_.backward_weight(step, {.dy = dy, .x = x_tD, .first = first_down_row(part)});
  if (!kv_a_.has_grad) return;
  StackScope scope(step.stack);
  const RowGroups rows = kv_a_rows_.groups(step, dy.dim(0));
  const auto [d, x] = down_precision(part).for_dw(quantize_context(step), dy, rows, x_tD, rows);
  gemm(step.stream, {.c_MN = down_rows(kv_a_.dw, part),
                     .a = d,
                     .b = x,
                     .trans_a = true,
                     .accumulate = kv_a_.adds_to_grad(step.batch)});
}

void Mla::normalise(Step& step, const Param& norm, const Latent& latent) const {
  rms_norm_fwd(
      step.stream,
      {.y_TD = latent.normed_tR, .rstd_T = latent.rstd_t, .x_TD = latent.c_tR, .w_D = norm.w, .eps = kLatentNormEps});
}

// dc: the derivative w.r.t. the latent.
void Mla::normalise_bwd(Step& step, const Param& norm, Tensor dc_tR, Tensor dnormed_tR, const Latent& latent) const {
  const int64_t t = dnormed_tR.dim(0), R = dnormed_tR.dim(1);
  StackScope scope(step.stack);
  fill_zero(step.stream, dc_tR);
  rms_norm_bwd(step.stream, {.dx_TD = dc_tR,
                             .dw_D = gradient_or_scratch(step, norm),
                             .partial_PD = step.alloc({RmsNormBwd::num_partials(t, R, step.stream), R}, DType::f32),
                             .dy_TD = dnormed_tR,
                             .x_TD = latent.c_tR,
                             .rstd_T = latent.rstd_t,
                             .w_D = norm.w});
}

RotateHeads Mla::rotation(Step& step, Tensor x_THw) const {
  return {.x_THw = x_THw,
          .pos_T = step.batch.pos_T.rows(0, x_THw.dim(0)),
          .cos_sin_Pr = rope_table_Pr_,
          .interleaved = interleaved_};
}

void Mla::rotate(Step& step, Tensor x_THw) const { rotate_heads(step.stream, rotation(step, x_THw)); }

void Mla::rotate_gradient(Step& step, Tensor dx_THw) const {
  RotateHeads op = rotation(step, dx_THw);
  op.transposed = true;
  rotate_heads(step.stream, op);
}

void Mla::make_q_latent(Step& step, Tensor x_tD, const Latent& latent) const {
  if (!q_a_) return;
  q_a_->forward(step, latent.c_tR, x_tD);
  if (q_a_bias_) q_a_bias_->forward(step, latent.c_tR);
}

void Mla::make_q(Step& step, Tensor q_THd, Tensor x_tD, const Latent& latent) const {
  if (q_a_) normalise(step, *q_a_norm_, latent);
  q_b_.forward(step, as_rows(q_THd), q_a_ ? latent.normed_tR : x_tD);
  rotate(step, q_THd);
}

void Mla::make_latent_kv(Step& step, Tensor k_rope_Tr, Tensor x_tD, const Latent& latent) const {
  down(step, latent.c_tR, x_tD, DownPart::latent);
  if (kv_a_bias_) kv_a_bias_->forward(step, latent.c_tR);
  StackScope scope(step.stack);
  const Tensor k_rope_tr = tp_ == 1 ? k_rope_Tr : step.alloc({x_tD.dim(0), rope_}, dtype_);
  down(step, k_rope_tr, x_tD, DownPart::k_rope);
  if (kv_a_bias_) kv_a_bias_->forward(step, k_rope_tr, kv_rank_);
  if (tp_ > 1) rows_.group().all_gather(step.stream, k_rope_Tr, k_rope_tr);
  rotate(step, k_rope_Tr.view({k_rope_Tr.dim(0), 1, rope_}));
}

Qkv Mla::alloc_qkv(Step& step, Tensor q_THd) const {
  return {q_THd, step.alloc(q_THd.shape, dtype_), step.alloc({q_THd.dim(0), H_, v_}, dtype_)};
}

void Mla::open_down(Step& step, Saved& saved) const {
  for (SavedLatent* latent : {&saved.q, &saved.kv}) {
    if (latent == &saved.q && !q_a_) continue;
    latent->c_tR.open(step.stack);
    latent->rstd_t.open(step.stack);
  }
  saved.k_rope_Tr.open(step.stack);
}

void Mla::project_down(Step& step, Tensor x_tD, Saved& saved) const {
  const int64_t t = x_tD.dim(0);
  make_q_latent(step, x_tD, saved.q.rows(t));
  make_latent_kv(step, saved.k_rope_Tr.rows(0, t * tp_), x_tD, saved.kv.rows(t));
}

void Mla::open_up(Step& step, Saved& saved) const {
  if (q_a_) saved.q.normed_tR.open(step.stack);
  for (SavedTensor* s : {&saved.kv.normed_tR, &saved.q_THd}) s->open(step.stack);
  if (!kv_->is_expanded_late()) saved.kv_THw.open(step.stack);
}

void Mla::project_up(Step& step, Tensor x_tD, Saved& saved) const {
  const int64_t t = x_tD.dim(0), T = t * tp_;
  const Latent kv = saved.kv.rows(t);
  make_q(step, saved.q_THd.rows(0, T), x_tD, saved.q.rows(t));
  normalise(step, kv_a_norm_, kv);
  if (kv_->is_expanded_late()) return;
  kv_->w().forward(step, as_rows(saved.kv_THw.rows(0, T)), kv.normed_tR);
}

Kv Mla::latents(Step& step, const Saved& saved, int64_t T) const {
  const Tensor latent_TR = rows_.gather(step, saved.kv.normed_tR.rows(0, T / tp_));
  return {latent_TR.view({T, 1, kv_rank_}), saved.k_rope_Tr.rows(0, T).view({T, 1, rope_})};
}

void Mla::attend(Step& step, Saved& saved, int64_t T) const {
  saved.o_THv.open(step.stack);
  saved.lse_TH.open(step.stack);
  StackScope scope(step.stack);
  Qkv r;
  if (kv_->is_expanded_late()) {
    const Kv sent = latents(step, saved, T);
    r = {saved.q_THd.rows(0, T), sent.k_TGd, sent.v_TGd};
  } else {
    r = alloc_qkv(step, saved.q_THd.rows(0, T));
    kv_->put_together(step, r.kv(), saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  }
  r.doc_start_T = step.batch.attention_starts(T);
  context_parallel_->forward(step, saved.o_THv.rows(0, T), saved.lse_TH.rows(0, T), r);
}

void Mla::output(Step& step, Tensor y_tD, const Saved& saved) const {
  o_.forward(step, y_tD, as_rows(saved.o_THv.rows(0, y_tD.dim(0) * tp_)));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

void Mla::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  StackScope scope(step.stack);
  open_down(step, saved);
  project_down(step, x_tD, saved);
  open_up(step, saved);
  project_up(step, x_tD, saved);
  attend(step, saved, x_tD.dim(0) * tp_);
  output(step, y_tD, saved);
}

void Mla::recompute(Step& step, const Attention::Input& x, Saved& saved) const {
  const bool down = saved.kv.c_tR.is_recomputed(), up = saved.q_THd.is_recomputed();
  if (holds_input(saved)) saved.x_tD = x();
  if (down) open_down(step, saved);
  if (up) open_up(step, saved);
  if (down || up) {
    StackScope scope(step.stack);
    const Tensor x_tD = is_long_ ? x() : saved.x_tD;
    if (down) project_down(step, x_tD, saved);
    if (up) project_up(step, x_tD, saved);
  }
  if (saved.o_THv.is_recomputed()) attend(step, saved, T_);
}

// Every rank computes the share that its own heads have in the gradient of k_rope. The sum of the
// shares is sent to the rank that has these rows.
void Mla::attend_bwd(Step& step, Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  StackScope scope(step.stack);
  const Qkv dr = alloc_qkv(step, saved.dq_THd);
  Qkv r{saved.q_THd.rows(0, T), {}, step.alloc({T, H_, v_}, dtype_)};
  // dkv is written after k has been read.
  const int64_t k_numel = r.q_THd.numel();
  r.k_TGd = k_numel <= saved.dkv_THw.numel()
                ? saved.dkv_THw.view({saved.dkv_THw.numel()}).rows(0, k_numel).view(r.q_THd.shape)
                : step.alloc(r.q_THd.shape, dtype_);
  const Tensor do_THv = step.alloc({T, H_, v_}, dtype_),
               dk_rope_Tr = tp_ == 1 ? saved.dk_rope_tr : step.alloc({T, rope_}, dtype_);
  kv_->put_together(step, r.kv(), saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  r.doc_start_T = step.batch.attention_starts(T);
  context_parallel_->backward(step, {.grads = dr,
                                     .do_THd = do_THv,
                                     .o_THd = saved.o_THv.rows(0, T),
                                     .lse_TH = saved.lse_TH.rows(0, T),
                                     .in = r,
                                     .compute_do = [&] { o_.backward_input(step, as_rows(do_THv), saved.dy_TD); }});
  latent_kv_bwd(step.stream,
                {.dkv_THw = saved.dkv_THw, .dk_rope_Tr = dk_rope_Tr, .dk_THd = dr.k_TGd, .dv_THv = dr.v_TGd});
  rotate_bwd(step, saved, dk_rope_Tr);
}

void Mla::rotate_bwd(Step& step, Saved& saved, Tensor dk_rope_Tr) const {
  rotate_gradient(step, saved.dq_THd);
  rotate_gradient(step, dk_rope_Tr.view({dk_rope_Tr.dim(0), 1, rope_}));
  if (tp_ > 1) rows_.sum(step, saved.dk_rope_tr, dk_rope_Tr);
}

void Mla::attend_latents_bwd(Step& step, Tensor dkv_normed_tR, Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  StackScope scope(step.stack);
  const Tensor do_THv = step.alloc({T, H_, v_}, dtype_),
               dlatent_TR = tp_ == 1 ? dkv_normed_tR : step.alloc({T, kv_rank_}, dtype_),
               dk_rope_Tr = tp_ == 1 ? saved.dk_rope_tr : step.alloc({T, rope_}, dtype_);
  const Kv sent = latents(step, saved, T);
  const Qkv in{.q_THd = saved.q_THd.rows(0, T),
               .k_TGd = sent.k_TGd,
               .v_TGd = sent.v_TGd,
               .doc_start_T = step.batch.attention_starts(T)};
  context_parallel_->backward(
      step, {.grads = {saved.dq_THd, dlatent_TR.view({T, 1, kv_rank_}), dk_rope_Tr.view({T, 1, rope_})},
             .do_THd = do_THv,
             .o_THd = saved.o_THv.rows(0, T),
             .lse_TH = saved.lse_TH.rows(0, T),
             .in = in,
             .compute_do = [&] { o_.backward_input(step, as_rows(do_THv), saved.dy_TD); }});
  rotate_bwd(step, saved, dk_rope_Tr);
  if (tp_ > 1) rows_.sum(step, dkv_normed_tR, dlatent_TR);
}

Attention::InputGradient Mla::backward_input(Step& step, Tensor dy_tD, Saved& saved, bool with_dx,
                                             const Attention::Input& /*x*/) const {
  const int64_t t = dy_tD.dim(0);
  if (o_bias_) saved.dy_tD.hold(step.stream, dy_tD);
  saved.dy_TD.hold(step.stream, o_.gather(step, dy_tD));
  for (WgradInput* d : {&saved.dq_THd, &saved.dk_rope_tr}) d->open(step.stack);
  Tensor dkv_normed_tR, dq_normed_tR;
  if (kv_->is_expanded_late()) {
    dkv_normed_tR = step.alloc({t, kv_rank_}, dtype_);
    attend_latents_bwd(step, dkv_normed_tR, saved);
  } else {
    saved.dkv_THw.open(step.stack);
    attend_bwd(step, saved);
    dkv_normed_tR = step.alloc({t, kv_rank_}, dtype_);
  }
  RowsInFlight dq_sum;  // beside the products with dkv
  if (q_a_) {
    dq_normed_tR = step.alloc({t, q_rank_}, dtype_);
    dq_sum = q_b_.start_backward_input(step, dq_normed_tR, as_rows(saved.dq_THd));
  }
  if (!kv_->is_expanded_late()) kv_->w().backward_input(step, dkv_normed_tR, as_rows(saved.dkv_THw));
  saved.dkv_latent_tR.open(step.stack);
  normalise_bwd(step, kv_a_norm_, saved.dkv_latent_tR, dkv_normed_tR, saved.kv.rows(t));
  const Tensor dx_tD = with_dx ? step.alloc(dy_tD.shape, dtype_) : Tensor{};
  if (with_dx) {
    down_bwd_input(step, dx_tD, saved.dkv_latent_tR, DownPart::latent);
    down_bwd_input(step, dx_tD, saved.dk_rope_tr, DownPart::k_rope);
  }
  if (!q_a_) {
    if (with_dx) q_b_.backward_input(step, dx_tD, as_rows(saved.dq_THd), /*accumulate=*/true);
    return {dx_tD};
  }
  dq_sum.wait();
  saved.dq_latent_tR.open(step.stack);
  normalise_bwd(step, *q_a_norm_, saved.dq_latent_tR, dq_normed_tR, saved.q.rows(t));
  if (with_dx) q_a_->backward_input(step, dx_tD, saved.dq_latent_tR, /*accumulate=*/true);
  return {dx_tD};
}

void Mla::backward_weight(Step& step, const Saved& saved) const {
  const int64_t t = saved.x_tD.dim(0), T = t * tp_;
  StackScope scope(step.stack);
  RowBlocks::Gathering q_in = q_b_.start_gather(step, q_a_ ? saved.q.normed_tR.rows(0, t) : saved.x_tD);
  if (kv_->is_expanded_late()) {
    o_.backward_weight(step, saved.dy_TD, as_rows(saved.o_THv.rows(0, T)));
  } else {
    RowBlocks::Gathering kv_in = kv_->w().start_gather(step, saved.kv.normed_tR.rows(0, t));
    o_.backward_weight(step, saved.dy_TD, as_rows(saved.o_THv.rows(0, T)));
    kv_->w().backward_weight(step, as_rows(saved.dkv_THw), std::move(kv_in));
  }
  down_bwd_weight(step, saved.dkv_latent_tR, saved.x_tD, DownPart::latent);
  down_bwd_weight(step, saved.dk_rope_tr, saved.x_tD, DownPart::k_rope);
  q_b_.backward_weight(step, as_rows(saved.dq_THd), std::move(q_in));
  if (q_a_) q_a_->backward_weight(step, saved.dq_latent_tR, saved.x_tD);
  if (!o_bias_) return;
  o_bias_->backward_weight(step, saved.dy_tD);
  kv_a_bias_->backward_weight(step, saved.dkv_latent_tR);
  kv_a_bias_->backward_weight(step, saved.dk_rope_tr, kv_rank_);
  if (q_a_bias_) q_a_bias_->backward_weight(step, saved.dq_latent_tR);
}

void Mla::declare_cache(MemoryPlan& plan, const std::string& prefix, int64_t num_tokens, KvCache& cache) const {
  plan.declare(cache.k_UGd, prefix + ".latent_cache", {num_tokens, 1, kv_rank_}, dtype_, Life::saved);
  plan.declare(cache.v_UGd, prefix + ".k_rope_cache", {num_tokens, 1, rope_}, dtype_, Life::saved);
}

std::vector<KeptTensor> Mla::kept(const Saved& saved) {
  return {{"query latent", saved.q.c_tR.kept()},
          {"key and value latent", saved.kv.c_tR.kept()},
          {"attention q", saved.q_THd.kept()},
          {"attention k, v", saved.kv_THw.kept()},
          {"attention output", saved.o_THv.kept()}};
}

void Mla::attend_cached(Step& step, Tensor o_THv, Tensor q_THd, Tensor latent_UR, Tensor k_rope_Ur) const {
  const int64_t U = latent_UR.dim(0);
  StackScope scope(step.stack);
  const Kv kv = kv_->expand(step, {latent_UR.view({U, 1, kv_rank_}), k_rope_Ur.view({U, 1, rope_})}, {.count = H_});
  AttentionFwd attention{.o_THd = o_THv,
                         .lse_TH = step.alloc({q_THd.dim(0), H_}, DType::f32),
                         .q_THd = q_THd,
                         .k_UGd = kv.k_TGd,
                         .v_UGd = kv.v_TGd,
                         .scale = scale_};
  attention.scratch = step.alloc_bytes(planned_scratch_bytes(attention, step.stream, kernels_));
  attention_fwd(step.stream, attention);
}

// Latents are shared by all heads, so every rank caches all rows of them.
void Mla::forward_cached(Step& step, Tensor y_tD, const RmsNormFwd& norm, const KvCache& cache,
                         const CachedRows& rows) const {
  const Tensor& x_tD = norm.y_TD;
  rms_norm_fwd(step.stream, norm);
  const int64_t t = x_tD.dim(0), T = t * tp_;
  StackScope scope(step.stack);
  const auto alloc_latent = [&](int64_t rank) {
    return Latent{step.alloc({t, rank}, dtype_), step.alloc({t}, DType::f32), step.alloc({t, rank}, dtype_)};
  };
  const Tensor q_THd = step.alloc({T, H_, nope_ + rope_}, dtype_), o_THv = step.alloc({T, H_, v_}, dtype_),
               k_rope_Tr = step.alloc({T, rope_}, dtype_);
  const Latent q_latent = q_a_ ? alloc_latent(q_rank_) : Latent{}, latent = alloc_latent(kv_rank_);
  make_q_latent(step, x_tD, q_latent);
  make_q(step, q_THd, x_tD, q_latent);
  make_latent_kv(step, k_rope_Tr, x_tD, latent);
  normalise(step, kv_a_norm_, latent);
  const Tensor latent_TR = tp_ == 1 ? latent.normed_tR : step.alloc({T, kv_rank_}, dtype_);
  if (tp_ > 1) rows_.group().all_gather(step.stream, latent_TR, latent.normed_tR);

  int64_t row = 0;
  for (const CachedRun& run : rows.runs) {
    const int64_t begin = run.sequence * rows.max_tokens, at = begin + run.first, end = at + run.count, U = end - begin,
                  last = row + run.count;
    copy(step.stream, cache.k_UGd.rows(at, end).view({run.count, kv_rank_}), latent_TR.rows(row, last));
    copy(step.stream, cache.v_UGd.rows(at, end).view({run.count, rope_}), k_rope_Tr.rows(row, last));
    attend_cached(step, o_THv.rows(row, last), q_THd.rows(row, last), cache.k_UGd.rows(begin, end).view({U, kv_rank_}),
                  cache.v_UGd.rows(begin, end).view({U, rope_}));
    row = last;
  }
  o_.forward(step, y_tD, as_rows(o_THv));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

}  // namespace moebius
