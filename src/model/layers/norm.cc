#include "model/layers/norm.h"

#include "model/frozen.h"
#include "ops/elementwise/elementwise.h"
#include "ops/norm/norm.h"

namespace moebius {

Norm::Norm(ParamTable& params, const std::string& name, int64_t width, DType dtype, float eps)
    : w_(params.declare({.name = name,
                         .shape = {width},
                         .dtype = dtype,
                         .init = ParamInit::ones,
                         .kind = ParamKind::norm,
                         .grad_axis = Axis::tp_cp_dp})),
      eps_(eps) {}

void Norm::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved) const {
  saved.sum_TD.declare_layer_input(plan, prefix + ".sum", {tokens, w_.w.dim(0)}, w_.spec.dtype);
  plan.declare(saved.rstd_T, prefix + ".rstd", {tokens}, DType::f32, Life::saved);
}

void Norm::declare_saved(MemoryPlan& plan, const std::string& prefix, int64_t tokens, Saved& saved,
                         bool RecomputeSpec::*sum) const {
  saved.sum_TD.declare(plan, prefix + ".sum", {tokens, w_.w.dim(0)}, w_.spec.dtype, sum);
  plan.declare(saved.rstd_T, prefix + ".rstd", {tokens}, DType::f32, Life::saved);
}

void Norm::forward(Step& step, Tensor y_TD, Tensor x_TD, Tensor residual_TD, Saved& saved) const {
  rms_norm_fwd(step.stream, op(step, y_TD, x_TD, residual_TD, saved));
}

RmsNormFwd Norm::op(Step& step, Tensor y_TD, Tensor x_TD, Tensor residual_TD, Saved& saved) const {
  const int64_t T = x_TD.dim(0);
  const Tensor sum_TD = saved.sum_TD.rows(0, T), rstd_T = saved.rstd_T.rows(0, T);
  if (residual_TD.empty()) {
    copy(step.stream, sum_TD, x_TD);
    return {.y_TD = y_TD, .rstd_T = rstd_T, .x_TD = sum_TD, .w_D = w_.w, .eps = eps_};
  }
  return {.y_TD = y_TD,
          .rstd_T = rstd_T,
          .sum_TD = sum_TD,
          .x_TD = x_TD,
          .residual_TD = residual_TD,
          .w_D = w_.w,
          .eps = eps_};
}

void Norm::recompute(Step& step, Tensor y_TD, const Saved& saved) const {
  rms_norm_fwd(step.stream, {.y_TD = y_TD, .rstd_T = saved.rstd_T, .x_TD = saved.sum_TD, .w_D = w_.w, .eps = eps_});
}

void Norm::backward(Step& step, Tensor dresidual_TD, Tensor dy_TD, const Saved& saved) const {
  const int64_t T = dy_TD.dim(0);
  StackScope scope(step.stack);
  rms_norm_bwd(step.stream, {.dx_TD = dresidual_TD,
                             .dw_D = gradient_or_scratch(step, w_),
                             .partial_PD = step.alloc(
                                 {RmsNormBwd::num_partials(T, w_.w.dim(0), step.stream), w_.w.dim(0)}, DType::f32),
                             .dy_TD = dy_TD,
                             .x_TD = saved.sum_TD.rows(0, T),
                             .rstd_T = saved.rstd_T.rows(0, T),
                             .w_D = w_.w});
}

}  // namespace moebius
