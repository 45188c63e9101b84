#include "model/mla.h"

#include <cmath>

#include "model/frozen.h"
#include "model/rope_frequencies.h"
#include "ops/attention/attention.h"
#include "ops/elementwise/elementwise.h"
#include "ops/gemm/gemm.h"
#include "ops/mla/mla.h"
#include "ops/norm/norm.h"

namespace moebius {
namespace {

constexpr float kLatentNormEps = 1e-6f;

ParamSpec matrix(const std::string& name, const ModelSpec& m, DType dtype, int64_t out, int64_t in) {
  return {.name = name, .shape = {out, in}, .dtype = dtype, .init_std = static_cast<float>(m.initializer_range)};
}

ParamSpec norm_weight(const std::string& name, DType dtype, int64_t width) {
  return {.name = name, .shape = {width}, .dtype = dtype, .init = ParamInit::ones, .decay = false};
}

Tensor as_rows(const Tensor& t_THw) { return t_THw.view({t_THw.dim(0), t_THw.dim(1) * t_THw.dim(2)}); }

void check_mesh(const MeshShape& shape) {
  MOEBIUS_CHECK(
      usage, shape.tp == 1 && shape.cp == 1,
      "parallel.tp = {} and cp = {} cannot be honoured: latent attention (model.kv_lora_rank) is not split over "
      "ranks yet; set both to 1",
      shape.tp, shape.cp);
}

}  // namespace

Mla::Latent Mla::SavedLatent::rows(int64_t T) const {
  if (c_TR.empty()) return {};
  return {c_TR.rows(0, T), rstd_T.rows(0, T), normed_TR.rows(0, T)};
}

Mla::Mla(ParamTable& params, const std::string& prefix, const ModelSpec& m, DType dtype, const Mesh& mesh,
         const Tensor& rope_table_Pr)
    : H_(m.num_heads),
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
        return Linear(params, matrix(prefix + ".q_a_proj.weight", m, dtype, q_rank_, m.hidden_size));
      }()),
      q_a_norm_(q_rank_ == 0 ? nullptr
                             : &params.declare(norm_weight(prefix + ".q_a_layernorm.weight", dtype, q_rank_))),
      q_b_(params, matrix(prefix + (q_rank_ > 0 ? ".q_b_proj.weight" : ".q_proj.weight"), m, dtype, m.q_size(),
                          q_rank_ > 0 ? q_rank_ : m.hidden_size)),
      kv_a_(params.declare(matrix(prefix + ".kv_a_proj_with_mqa.weight", m, dtype, kv_rank_ + rope_, m.hidden_size))),
      kv_a_norm_(params.declare(norm_weight(prefix + ".kv_a_layernorm.weight", dtype, kv_rank_))),
      kv_b_(params, matrix(prefix + ".kv_b_proj.weight", m, dtype, H_ * (nope_ + v_), kv_rank_)),
      o_(params, matrix(prefix + ".o_proj.weight", m, dtype, m.hidden_size, H_ * v_)),
      rope_table_Pr_(rope_table_Pr) {
  check_mesh(mesh.shape());
}

void Mla::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const {
  const auto latent = [&](const char* name, int64_t rank, SavedLatent& l) {
    l.c_TR.declare(plan, prefix + name, {tokens, rank}, dtype_, &RecomputeSpec::qkv);
    l.rstd_T.declare(plan, prefix + name + "_rstd", {tokens}, DType::f32, &RecomputeSpec::qkv);
    l.normed_TR.declare(plan, prefix + name + "_normed", {tokens, rank}, dtype_, &RecomputeSpec::qkv);
  };
  if (q_rank_ > 0) latent(".q_latent", q_rank_, saved.q);
  latent(".kv_latent", kv_rank_, saved.kv);
  saved.q_THd.declare(plan, prefix + ".q", {tokens, H_, nope_ + rope_}, dtype_, &RecomputeSpec::qkv);
  saved.kv_THw.declare(plan, prefix + ".kv", {tokens, H_, nope_ + v_}, dtype_, &RecomputeSpec::qkv);
  saved.k_rope_Tr.declare(plan, prefix + ".k_rope", {tokens, rope_}, dtype_, &RecomputeSpec::qkv);
  saved.o_THv.declare(plan, prefix + ".o", {tokens, H_, v_}, dtype_, &RecomputeSpec::attention);
  saved.lse_TH.declare(plan, prefix + ".lse", {tokens, H_}, DType::f32, &RecomputeSpec::attention);
}

Tensor Mla::down_rows(const Tensor& kv_a, bool rope) const {
  return rope ? kv_a.rows(kv_rank_, kv_rank_ + rope_) : kv_a.rows(0, kv_rank_);
}

void Mla::normalise(Step& step, const Param& norm, const Latent& latent) const {
  rms_norm_fwd(
      step.stream,
      {.y_TD = latent.normed_TR, .rstd_T = latent.rstd_T, .x_TD = latent.c_TR, .w_D = norm.w, .eps = kLatentNormEps});
}

// The derivative by the latent, on the step stack.
Tensor Mla::normalise_bwd(Step& step, const Param& norm, Tensor dnormed_TR, const Latent& latent) const {
  const int64_t T = dnormed_TR.dim(0), R = dnormed_TR.dim(1);
  const Tensor dc_TR = step.take({T, R}, dtype_);
  StackScope scope(step.stack);
  fill_zero(step.stream, dc_TR);
  rms_norm_bwd(step.stream, {.dx_TD = dc_TR,
                             .dw_D = gradient_or_scratch(step, norm),
                             .partial_PD = step.take({RmsNormBwd::num_partials(T, R, step.stream), R}, DType::f32),
                             .dy_TD = dnormed_TR,
                             .x_TD = latent.c_TR,
                             .rstd_T = latent.rstd_T,
                             .w_D = norm.w});
  return dc_TR;
}

void Mla::rotate(Step& step, Tensor x_THw, bool transposed) const {
  rotate_heads(step.stream, {.x_THw = x_THw,
                             .pos_T = step.batch.pos_T.rows(0, x_THw.dim(0)),
                             .cos_sin_Pr = rope_table_Pr_,
                             .interleaved = interleaved_,
                             .transposed = transposed});
}

void Mla::make_q(Step& step, Tensor q_THd, Tensor x_TD, const Latent& latent) const {
  if (q_a_) {
    q_a_->forward(step, latent.c_TR, x_TD);
    normalise(step, *q_a_norm_, latent);
  }
  q_b_.forward(step, as_rows(q_THd), q_a_ ? latent.normed_TR : x_TD);
  rotate(step, q_THd, false);
}

void Mla::make_latent_kv(Step& step, Tensor k_rope_Tr, Tensor x_TD, const Latent& latent) const {
  gemm(step.stream, {.c_MN = latent.c_TR, .a = x_TD, .b = down_rows(kv_a_.w, false), .trans_b = true});
  gemm(step.stream, {.c_MN = k_rope_Tr, .a = x_TD, .b = down_rows(kv_a_.w, true), .trans_b = true});
  normalise(step, kv_a_norm_, latent);
  rotate(step, k_rope_Tr.view({k_rope_Tr.dim(0), 1, rope_}), false);
}

void Mla::put_kv_together(Step& step, Tensor k_THd, Tensor v_THv, Tensor kv_THw, Tensor k_rope_Tr) const {
  latent_kv_fwd(step.stream, {.k_THd = k_THd, .v_THv = v_THv, .kv_THw = kv_THw, .k_rope_Tr = k_rope_Tr});
}

void Mla::project(Step& step, Tensor x_TD, Saved& saved) const {
  const int64_t T = x_TD.dim(0);
  if (q_a_) {
    for (SavedTensor* t : {&saved.q.c_TR, &saved.q.rstd_T, &saved.q.normed_TR}) t->open(step.stack);
  }
  for (SavedTensor* t :
       {&saved.kv.c_TR, &saved.kv.rstd_T, &saved.kv.normed_TR, &saved.q_THd, &saved.kv_THw, &saved.k_rope_Tr})
    t->open(step.stack);
  const Latent kv = saved.kv.rows(T);
  make_q(step, saved.q_THd.rows(0, T), x_TD, saved.q.rows(T));
  make_latent_kv(step, saved.k_rope_Tr.rows(0, T), x_TD, kv);
  kv_b_.forward(step, as_rows(saved.kv_THw.rows(0, T)), kv.normed_TR);
}

void Mla::attend(Step& step, Saved& saved, int64_t T) const {
  saved.o_THv.open(step.stack);
  saved.lse_TH.open(step.stack);
  StackScope scope(step.stack);
  const Tensor k_THd = step.take({T, H_, nope_ + rope_}, dtype_), v_THv = step.take({T, H_, v_}, dtype_);
  put_kv_together(step, k_THd, v_THv, saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  AttentionFwd attention{.o_THd = saved.o_THv.rows(0, T),
                         .lse_TH = saved.lse_TH.rows(0, T),
                         .q_THd = saved.q_THd.rows(0, T),
                         .k_UGd = k_THd,
                         .v_UGd = v_THv,
                         .doc_start_T = step.batch.attention_starts(T),
                         .batch = step.batch.shape.batch,
                         .scale = scale_};
  attention.scratch = step.take_bytes(AttentionFwd::scratch_bytes(attention, step.stream));
  attention_fwd(step.stream, attention);
}

void Mla::output(Step& step, Tensor y_TD, const Saved& saved) const {
  o_.forward(step, y_TD, as_rows(saved.o_THv.rows(0, y_TD.dim(0))));
}

void Mla::forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  StackScope scope(step.stack);
  project(step, x_TD, saved);
  attend(step, saved, x_TD.dim(0));
  output(step, y_TD, saved);
}

void Mla::remake(Step& step, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  if (saved.q_THd.is_remade()) project(step, x_TD, saved);
  if (saved.o_THv.is_remade()) attend(step, saved, x_TD.dim(0));
}

void Mla::attend_bwd(Step& step, Tensor dy_TD, Saved& saved) const {
  const int64_t T = dy_TD.dim(0);
  StackScope scope(step.stack);
  const Tensor k_THd = step.take(saved.dq_THd.shape, dtype_), dk_THd = step.take(saved.dq_THd.shape, dtype_),
               v_THv = step.take({T, H_, v_}, dtype_), dv_THv = step.take(v_THv.shape, dtype_),
               do_THv = step.take(v_THv.shape, dtype_);
  o_.backward_input(step, as_rows(do_THv), dy_TD);
  put_kv_together(step, k_THd, v_THv, saved.kv_THw.rows(0, T), saved.k_rope_Tr.rows(0, T));
  AttentionBwd attention{.dq_THd = saved.dq_THd,
                         .dk_TGd = dk_THd,
                         .dv_TGd = dv_THv,
                         .do_THd = do_THv,
                         .o_THd = saved.o_THv.rows(0, T),
                         .lse_TH = saved.lse_TH.rows(0, T),
                         .q_THd = saved.q_THd.rows(0, T),
                         .k_TGd = k_THd,
                         .v_TGd = v_THv,
                         .doc_start_T = step.batch.attention_starts(T),
                         .batch = step.batch.shape.batch,
                         .scale = scale_};
  attention.scratch = step.take_bytes(AttentionBwd::scratch_bytes(attention, step.stream));
  attention_bwd(step.stream, attention);
  latent_kv_bwd(step.stream,
                {.dkv_THw = saved.dkv_THw, .dk_rope_Tr = saved.dk_rope_Tr, .dk_THd = dk_THd, .dv_THv = dv_THv});
}

void Mla::backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const int64_t T = dy_TD.dim(0);
  saved.dy_TD = dy_TD;
  saved.dq_THd = step.take({T, H_, nope_ + rope_}, dtype_);
  saved.dkv_THw = step.take({T, H_, nope_ + v_}, dtype_);
  saved.dk_rope_Tr = step.take({T, rope_}, dtype_);
  attend_bwd(step, dy_TD, saved);
  rotate(step, saved.dq_THd, true);
  rotate(step, saved.dk_rope_Tr.view({T, 1, rope_}), true);

  const Tensor dkv_normed_TR = step.take({T, kv_rank_}, dtype_);
  kv_b_.backward_input(step, dkv_normed_TR, as_rows(saved.dkv_THw));
  saved.dkv_latent_TR = normalise_bwd(step, kv_a_norm_, dkv_normed_TR, saved.kv.rows(T));
  gemm(step.stream, {.c_MN = dx_TD, .a = saved.dkv_latent_TR, .b = down_rows(kv_a_.w, false)});
  gemm(step.stream, {.c_MN = dx_TD, .a = saved.dk_rope_Tr, .b = down_rows(kv_a_.w, true), .accumulate = true});
  if (!q_a_) return q_b_.backward_input(step, dx_TD, as_rows(saved.dq_THd), /*accumulate=*/true);
  const Tensor dq_normed_TR = step.take({T, q_rank_}, dtype_);
  q_b_.backward_input(step, dq_normed_TR, as_rows(saved.dq_THd));
  saved.dq_latent_TR = normalise_bwd(step, *q_a_norm_, dq_normed_TR, saved.q.rows(T));
  q_a_->backward_input(step, dx_TD, saved.dq_latent_TR, /*accumulate=*/true);
}

void Mla::backward_weight(Step& step, const Saved& saved) const {
  const int64_t T = saved.dy_TD.dim(0);
  const auto down_wgrad = [&](bool rope, Tensor dy) {
    gemm(step.stream,
         {.c_MN = down_rows(kv_a_.dw, rope), .a = dy, .b = saved.x_TD, .trans_a = true, .accumulate = true});
  };
  o_.backward_weight(step, saved.dy_TD, as_rows(saved.o_THv.rows(0, T)));
  kv_b_.backward_weight(step, as_rows(saved.dkv_THw), saved.kv.normed_TR.rows(0, T));
  if (kv_a_.has_grad) {
    down_wgrad(false, saved.dkv_latent_TR);
    down_wgrad(true, saved.dk_rope_Tr);
  }
  q_b_.backward_weight(step, as_rows(saved.dq_THd), q_a_ ? saved.q.normed_TR.rows(0, T) : saved.x_TD);
  if (q_a_) q_a_->backward_weight(step, saved.dq_latent_TR, saved.x_TD);
}

void Mla::declare_cache(MemoryPlan& plan, const std::string& prefix, const ModelSpec& m, DType dtype,
                        int64_t max_tokens, KvCache& cache) {
  plan.declare(cache.k_UGd, prefix + ".latent_cache", {max_tokens, 1, m.kv_lora_rank}, dtype, Life::saved);
  plan.declare(cache.v_UGd, prefix + ".k_rope_cache", {max_tokens, 1, m.qk_rope_head_dim}, dtype, Life::saved);
}

void Mla::forward_cached(Step& step, Tensor y_TD, Tensor x_TD, KvCache& cache, int64_t first) const {
  const int64_t T = x_TD.dim(0), U = first + T;
  StackScope scope(step.stack);
  const auto take_latent = [&](int64_t rank) {
    return Latent{step.take({T, rank}, dtype_), step.take({T}, DType::f32), step.take({T, rank}, dtype_)};
  };
  const Tensor q_THd = step.take({T, H_, nope_ + rope_}, dtype_), o_THv = step.take({T, H_, v_}, dtype_);
  make_q(step, q_THd, x_TD, q_a_ ? take_latent(q_rank_) : Latent{});
  Latent latent = take_latent(kv_rank_);
  latent.normed_TR = cache.k_UGd.rows(first, U).view({T, kv_rank_});
  make_latent_kv(step, cache.v_UGd.rows(first, U).view({T, rope_}), x_TD, latent);

  const Tensor kv_UHw = step.take({U, H_, nope_ + v_}, dtype_), k_UHd = step.take({U, H_, nope_ + rope_}, dtype_),
               v_UHv = step.take({U, H_, v_}, dtype_);
  kv_b_.forward(step, as_rows(kv_UHw), cache.k_UGd.rows(0, U).view({U, kv_rank_}));
  put_kv_together(step, k_UHd, v_UHv, kv_UHw, cache.v_UGd.rows(0, U).view({U, rope_}));
  AttentionFwd attention{.o_THd = o_THv,
                         .lse_TH = step.take({T, H_}, DType::f32),
                         .q_THd = q_THd,
                         .k_UGd = k_UHd,
                         .v_UGd = v_UHv,
                         .scale = scale_};
  attention.scratch = step.take_bytes(AttentionFwd::scratch_bytes(attention, step.stream));
  attention_fwd(step.stream, attention);
  o_.forward(step, y_TD, as_rows(o_THv));
}

}  // namespace moebius
