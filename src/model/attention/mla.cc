#include "model/attention/mla.h"

#include <cmath>

#include "model/attention/rope_frequencies.h"
#include "model/frozen.h"
#include "ops/attention/attention.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/mla.h"
#include "ops/norm/norm.h"

namespace moebius {
namespace {

constexpr float kLatentNormEps = 1e-6f;

// What every rank has whole adds its gradient of a rank's own rows.
ParamSpec whole_matrix(const std::string& name, const ModelSpec& m, DType dtype, int64_t out, int64_t in) {
  return {.name = name,
          .shape = {out, in},
          .dtype = dtype,
          .init_std = static_cast<float>(m.initializer_range),
          .grad_axis = Axis::tp_cp_dp};
}

ParamSpec norm_weight(const std::string& name, DType dtype, int64_t width) {
  return {.name = name,
          .shape = {width},
          .dtype = dtype,
          .init = ParamInit::ones,
          .kind = ParamKind::norm,
          .grad_axis = Axis::tp_cp_dp};
}

// The same of one row.
ParamSpec whole_bias(const std::string& name, DType dtype, int64_t width) {
  return {.name = name,
          .shape = {width},
          .dtype = dtype,
          .init = ParamInit::zeros,
          .kind = ParamKind::bias,
          .grad_axis = Axis::tp_cp_dp};
}

// This rank's block of dimension dim, which is of heads.
ParamSpec heads_matrix(const std::string& name, const ModelSpec& m, DType dtype, const Mesh& mesh, const Shape& whole,
                       int dim) {
  const ParamPart part{name, whole, 0, shard_of(whole, dim, mesh.place().tp, mesh.shape().tp)};
  return {.name = name,
          .shape = part.local_shape(),
          .dtype = dtype,
          .parts = {part},
          .init_std = static_cast<float>(m.initializer_range)};
}

Tensor as_rows(const Tensor& t_THw) { return t_THw.view({t_THw.dim(0), t_THw.dim(1) * t_THw.dim(2)}); }

}  // namespace

Mla::Latent Mla::SavedLatent::rows(int64_t t) const {
  if (c_tR.empty()) return {};
  return {c_tR.rows(0, t), rstd_t.rows(0, t), normed_tR.rows(0, t)};
}

Mla::Mla(ParamTable& params, const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh,
         CpComm cp_comm, const Tensor& rope_table_Pr)
    : tp_(mesh.shape().tp),
      H_(div_exact(m.num_heads, tp_, "attention: query heads over parallel.tp")),
      nope_(m.qk_nope_head_dim()),
      rope_(m.qk_rope_head_dim),
      v_(m.v_head_dim),
      q_rank_(m.q_lora_rank),
      kv_rank_(m.kv_lora_rank),
      scale_(static_cast<float>(attention_scale_of_rope(m) / std::sqrt(static_cast<double>(m.head_dim)))),
      interleaved_(m.rope_interleave),
      dtype_(dtype),
      q_a_([&]() -> std::optional<Linear> {
        if (q_rank_ == 0) return std::nullopt;
        return Linear(params, whole_matrix(prefix + ".q_a_proj.weight", m, dtype, q_rank_, m.hidden_size));
      }()),
      q_a_norm_(q_rank_ == 0 ? nullptr
                             : &params.declare(norm_weight(prefix + ".q_a_layernorm.weight", dtype, q_rank_))),
      q_b_(params,
           heads_matrix(prefix + (q_rank_ > 0 ? ".q_b_proj.weight" : ".q_proj.weight"), m, dtype, mesh,
                        {m.q_size(), q_rank_ > 0 ? q_rank_ : m.hidden_size}, 0),
           mesh),
      kv_a_(params.declare(
          whole_matrix(prefix + ".kv_a_proj_with_mqa.weight", m, dtype, kv_rank_ + rope_, m.hidden_size))),
      kv_a_norm_(params.declare(norm_weight(prefix + ".kv_a_layernorm.weight", dtype, kv_rank_))),
      kv_b_(params,
            heads_matrix(prefix + ".kv_b_proj.weight", m, dtype, mesh, {m.num_heads * (nope_ + v_), kv_rank_}, 0),
            mesh),
      o_(params, heads_matrix(prefix + ".o_proj.weight", m, dtype, mesh, {m.hidden_size, m.num_heads * v_}, 1), mesh),
      rows_(mesh),
      context_parallel_(make_context_parallel(cp_comm, mesh, {.heads = H_, .kv_heads = H_, .scale = scale_})),
      rope_table_Pr_(rope_table_Pr) {
  if (!m.o_bias) return;
  if (q_a_) q_a_bias_.emplace(params, whole_bias(prefix + ".q_a_proj.bias", dtype, q_rank_));
  kv_a_bias_.emplace(params, whole_bias(prefix + ".kv_a_proj_with_mqa.bias", dtype, kv_rank_ + rope_));
  o_bias_.emplace(params, whole_bias(prefix + ".o_proj.bias", dtype, m.hidden_size));
}

void Mla::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const {
  const auto latent = [&](const char* name, int64_t rank, SavedLatent& l) {
    l.c_tR.declare(plan, prefix + name, {tokens, rank}, dtype_, &RecomputeSpec::qkv);
    l.rstd_t.declare(plan, prefix + name + "_rstd", {tokens}, DType::f32, &RecomputeSpec::qkv);
    l.normed_tR.declare(plan, prefix + name + "_normed", {tokens, rank}, dtype_, &RecomputeSpec::qkv);
  };
  const int64_t T = tokens * tp_;
  if (q_rank_ > 0) latent(".q_latent", q_rank_, saved.q);
  latent(".kv_latent", kv_rank_, saved.kv);
  saved.q_THd.declare(plan, prefix + ".q", {T, H_, nope_ + rope_}, dtype_, &RecomputeSpec::qkv);
  saved.kv_THw.declare(plan, prefix + ".kv", {T, H_, nope_ + v_}, dtype_, &RecomputeSpec::qkv);
  saved.k_rope_Tr.declare(plan, prefix + ".k_rope", {T, rope_}, dtype_, &RecomputeSpec::qkv);
  saved.o_THv.declare(plan, prefix + ".o", {T, H_, v_}, dtype_, &RecomputeSpec::attention);
  saved.lse_TH.declare(plan, prefix + ".lse", {T, H_}, DType::f32, &RecomputeSpec::attention);
}

Tensor Mla::down_rows(const Tensor& kv_a, bool rope) const {
  return rope ? kv_a.rows(kv_rank_, kv_rank_ + rope_) : kv_a.rows(0, kv_rank_);
}

void Mla::normalise(Step& step, const Param& norm, const Latent& latent) const {
  rms_norm_fwd(
      step.stream,
      {.y_TD = latent.normed_tR, .rstd_T = latent.rstd_t, .x_TD = latent.c_tR, .w_D = norm.w, .eps = kLatentNormEps});
}

// The derivative by the latent, on the step stack.
Tensor Mla::normalise_bwd(Step& step, const Param& norm, Tensor dnormed_tR, const Latent& latent) const {
  const int64_t t = dnormed_tR.dim(0), R = dnormed_tR.dim(1);
  const Tensor dc_tR = step.alloc({t, R}, dtype_);
  StackScope scope(step.stack);
  fill_zero(step.stream, dc_tR);
  rms_norm_bwd(step.stream, {.dx_TD = dc_tR,
                             .dw_D = gradient_or_scratch(step, norm),
                             .partial_PD = step.alloc({RmsNormBwd::num_partials(t, R, step.stream), R}, DType::f32),
                             .dy_TD = dnormed_tR,
                             .x_TD = latent.c_tR,
                             .rstd_T = latent.rstd_t,
                             .w_D = norm.w});
  return dc_tR;
}

void Mla::rotate(Step& step, Tensor x_THw, bool transposed) const {
  rotate_heads(step.stream, {.x_THw = x_THw,
                             .pos_T = step.batch.pos_T.rows(0, x_THw.dim(0)),
                             .cos_sin_Pr = rope_table_Pr_,
                             .interleaved = interleaved_,
                             .transposed = transposed});
}

void Mla::make_q(Step& step, Tensor q_THd, Tensor x_tD, const Latent& latent) const {
  if (q_a_) {
    q_a_->forward(step, latent.c_tR, x_tD);
    if (q_a_bias_) q_a_bias_->forward(step, latent.c_tR);
    normalise(step, *q_a_norm_, latent);
  }
  q_b_.forward(step, as_rows(q_THd), q_a_ ? latent.normed_tR : x_tD);
  rotate(step, q_THd, false);
}

void Mla::make_latent_kv(Step& step, Tensor k_rope_Tr, Tensor x_tD, const Latent& latent) const {
  gemm(step.stream, {.c_MN = latent.c_tR, .a = x_tD, .b = down_rows(kv_a_.w, false), .trans_b = true});
  if (kv_a_bias_) kv_a_bias_->forward(step, latent.c_tR);
  normalise(step, kv_a_norm_, latent);
  StackScope scope(step.stack);
  const Tensor k_rope_tr = tp_ == 1 ? k_rope_Tr : step.alloc({x_tD.dim(0), rope_}, dtype_);
  gemm(step.stream, {.c_MN = k_rope_tr, .a = x_tD, .b = down_rows(kv_a_.w, true), .trans_b = true});
  if (kv_a_bias_) kv_a_bias_->forward(step, k_rope_tr, kv_rank_);
  if (tp_ > 1) rows_.group().all_gather(step.stream, k_rope_Tr, k_rope_tr);
  rotate(step, k_rope_Tr.view({k_rope_Tr.dim(0), 1, rope_}), false);
}

Qkv Mla::take_qkv(Step& step, Tensor q_THd) const {
  return {q_THd, step.alloc(q_THd.shape, dtype_), step.alloc({q_THd.dim(0), H_, v_}, dtype_)};
}

void Mla::put_kv_together(Step& step, const Qkv& out, Tensor kv_THw, Tensor k_rope_Tr) const {
  latent_kv_fwd(step.stream, {.k_THd = out.k_TGd, .v_THv = out.v_TGd, .kv_THw = kv_THw, .k_rope_Tr = k_rope_Tr});
}

void Mla::project(Step& step, Tensor x_tD, Saved& saved) const {
  const int64_t t = x_tD.dim(0), T = t * tp_;
  if (q_a_) {
    for (SavedTensor* s : {&saved.q.c_tR, &saved.q.rstd_t, &saved.q.normed_tR}) s->open(step.stack);
  }
  for (SavedTensor* s :
       {&saved.kv.c_tR, &saved.kv.rstd_t, &saved.kv.normed_tR, &saved.q_THd, &saved.kv_THw, &saved.k_rope_Tr})
    s->open(step.stack);
  const Latent kv = saved.kv.rows(t);
  make_q(step, saved.q_THd.rows(0, T), x_tD, saved.q.rows(t));
  make_latent_kv(step, saved.k_rope_Tr.rows(0, T), x_tD, kv);
  kv_b_.forward(step, as_rows(saved.kv_THw.rows(0, T)), kv.normed_tR);
}

void Mla::attend(Step& step, Saved& saved, int64_t T) const {
  saved.o_THv.open(step.stack);
  saved.lse_TH.open(step.stack);
  StackScope scope(step.stack);
  const Qkv r = take_qkv(step, saved.q_THd.rows(0, T));
  put_kv_together(step, r, saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  context_parallel_->forward(step, saved.o_THv.rows(0, T), saved.lse_TH.rows(0, T), r);
}

void Mla::output(Step& step, Tensor y_tD, const Saved& saved) const {
  o_.forward(step, y_tD, as_rows(saved.o_THv.rows(0, y_tD.dim(0) * tp_)));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

void Mla::forward(Step& step, Tensor y_tD, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  StackScope scope(step.stack);
  project(step, x_tD, saved);
  attend(step, saved, x_tD.dim(0) * tp_);
  output(step, y_tD, saved);
}

void Mla::remake(Step& step, Tensor x_tD, Saved& saved) const {
  saved.x_tD = x_tD;
  if (saved.q_THd.is_remade()) project(step, x_tD, saved);
  if (saved.o_THv.is_remade()) attend(step, saved, x_tD.dim(0) * tp_);
}

// Of k_rope every rank has the share of its own heads; their sum is for the rank whose rows they are.
void Mla::attend_bwd(Step& step, Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  StackScope scope(step.stack);
  const Qkv r = take_qkv(step, saved.q_THd.rows(0, T)), dr = take_qkv(step, saved.dq_THd);
  const Tensor do_THv = step.alloc({T, H_, v_}, dtype_),
               dk_rope_Tr = tp_ == 1 ? saved.dk_rope_tr : step.alloc({T, rope_}, dtype_);
  o_.backward_input(step, as_rows(do_THv), saved.dy_TD);
  put_kv_together(step, r, saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  context_parallel_->backward(step, dr, do_THv, saved.o_THv.rows(0, T), saved.lse_TH.rows(0, T), r);
  latent_kv_bwd(step.stream,
                {.dkv_THw = saved.dkv_THw, .dk_rope_Tr = dk_rope_Tr, .dk_THd = dr.k_TGd, .dv_THv = dr.v_TGd});
  rotate(step, saved.dq_THd, true);
  rotate(step, dk_rope_Tr.view({T, 1, rope_}), true);
  if (tp_ > 1) rows_.sum(step, saved.dk_rope_tr, dk_rope_Tr);
}

void Mla::backward_input(Step& step, Tensor dx_tD, Tensor dy_tD, Saved& saved) const {
  const int64_t t = dy_tD.dim(0), T = t * tp_;
  saved.dy_tD = dy_tD;
  saved.dy_TD = o_.gather(step, dy_tD);
  saved.dq_THd = step.alloc({T, H_, nope_ + rope_}, dtype_);
  saved.dkv_THw = step.alloc({T, H_, nope_ + v_}, dtype_);
  saved.dk_rope_tr = step.alloc({t, rope_}, dtype_);
  attend_bwd(step, saved);

  const Tensor dkv_normed_tR = step.alloc({t, kv_rank_}, dtype_);
  kv_b_.backward_input(step, dkv_normed_tR, as_rows(saved.dkv_THw));
  saved.dkv_latent_tR = normalise_bwd(step, kv_a_norm_, dkv_normed_tR, saved.kv.rows(t));
  gemm(step.stream, {.c_MN = dx_tD, .a = saved.dkv_latent_tR, .b = down_rows(kv_a_.w, false)});
  gemm(step.stream, {.c_MN = dx_tD, .a = saved.dk_rope_tr, .b = down_rows(kv_a_.w, true), .accumulate = true});
  if (!q_a_) return q_b_.backward_input(step, dx_tD, as_rows(saved.dq_THd), /*accumulate=*/true);
  const Tensor dq_normed_tR = step.alloc({t, q_rank_}, dtype_);
  q_b_.backward_input(step, dq_normed_tR, as_rows(saved.dq_THd));
  saved.dq_latent_tR = normalise_bwd(step, *q_a_norm_, dq_normed_tR, saved.q.rows(t));
  q_a_->backward_input(step, dx_tD, saved.dq_latent_tR, /*accumulate=*/true);
}

void Mla::backward_weight(Step& step, const Saved& saved) const {
  const int64_t t = saved.x_tD.dim(0), T = t * tp_;
  const auto down_wgrad = [&](bool rope, Tensor dy) {
    gemm(step.stream,
         {.c_MN = down_rows(kv_a_.dw, rope), .a = dy, .b = saved.x_tD, .trans_a = true, .accumulate = true});
  };
  o_.backward_weight(step, saved.dy_TD, as_rows(saved.o_THv.rows(0, T)));
  kv_b_.backward_weight(step, as_rows(saved.dkv_THw), saved.kv.normed_tR.rows(0, t));
  if (kv_a_.has_grad) {
    down_wgrad(false, saved.dkv_latent_tR);
    down_wgrad(true, saved.dk_rope_tr);
  }
  q_b_.backward_weight(step, as_rows(saved.dq_THd), q_a_ ? saved.q.normed_tR.rows(0, t) : saved.x_tD);
  if (q_a_) q_a_->backward_weight(step, saved.dq_latent_tR, saved.x_tD);
  if (!o_bias_) return;
  o_bias_->backward_weight(step, saved.dy_tD);
  kv_a_bias_->backward_weight(step, saved.dkv_latent_tR);
  kv_a_bias_->backward_weight(step, saved.dk_rope_tr, kv_rank_);
  if (q_a_bias_) q_a_bias_->backward_weight(step, saved.dq_latent_tR);
}

void Mla::declare_cache(MemoryPlan& plan, const std::string& prefix, const ModelSpec& m, DType dtype,
                        int64_t max_tokens, KvCache& cache) {
  plan.declare(cache.k_UGd, prefix + ".latent_cache", {max_tokens, 1, m.kv_lora_rank}, dtype, Life::saved);
  plan.declare(cache.v_UGd, prefix + ".k_rope_cache", {max_tokens, 1, m.qk_rope_head_dim}, dtype, Life::saved);
}

// Latents are not of heads: every rank caches those of all rows.
void Mla::forward_cached(Step& step, Tensor y_tD, Tensor x_tD, const KvCache& cache, int64_t first) const {
  const int64_t t = x_tD.dim(0), T = t * tp_, U = first + T;
  StackScope scope(step.stack);
  const auto take_latent = [&](int64_t rank) {
    return Latent{step.alloc({t, rank}, dtype_), step.alloc({t}, DType::f32), step.alloc({t, rank}, dtype_)};
  };
  const Tensor q_THd = step.alloc({T, H_, nope_ + rope_}, dtype_), o_THv = step.alloc({T, H_, v_}, dtype_);
  make_q(step, q_THd, x_tD, q_a_ ? take_latent(q_rank_) : Latent{});
  Latent latent = take_latent(kv_rank_);
  const Tensor cached_TR = cache.k_UGd.rows(first, U).view({T, kv_rank_});
  if (tp_ == 1) latent.normed_tR = cached_TR;
  make_latent_kv(step, cache.v_UGd.rows(first, U).view({T, rope_}), x_tD, latent);
  if (tp_ > 1) rows_.group().all_gather(step.stream, cached_TR, latent.normed_tR);

  const Tensor kv_UHw = step.alloc({U, H_, nope_ + v_}, dtype_);
  const Qkv r{q_THd, step.alloc({U, H_, nope_ + rope_}, dtype_), step.alloc({U, H_, v_}, dtype_)};
  const Tensor latent_UR = cache.k_UGd.rows(0, U).view({U, kv_rank_});
  gemm(step.stream, {.c_MN = as_rows(kv_UHw), .a = latent_UR, .b = kv_b_.param().w, .trans_b = true});
  put_kv_together(step, r, kv_UHw, cache.v_UGd.rows(0, U).view({U, rope_}));
  AttentionFwd attention{.o_THd = o_THv,
                         .lse_TH = step.alloc({T, H_}, DType::f32),
                         .q_THd = q_THd,
                         .k_UGd = r.k_TGd,
                         .v_UGd = r.v_TGd,
                         .scale = scale_};
  attention.scratch = step.alloc_bytes(AttentionFwd::scratch_bytes(attention, step.stream));
  attention_fwd(step.stream, attention);
  o_.forward(step, y_tD, as_rows(o_THv));
  if (o_bias_) o_bias_->forward(step, y_tD);
}

}  // namespace moebius
