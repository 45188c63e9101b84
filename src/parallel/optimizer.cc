#include "parallel/optimizer.h"

#include <algorithm>

#include "ops/elementwise/elementwise.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {

Optimizer::Optimizer(const OptimizerSpec& spec, const ParamTable& params, const Mesh& mesh, MemoryPlan& plan)
    : spec_(spec), mesh_(mesh) {
  MOEBIUS_CHECK(usage, spec.name == "adamw", "optimizer.name: expected \"adamw\"; got \"{}\"", spec.name);
  for (const Param& p : params.all()) {
    if (!p.spec.trainable) continue;
    Moments& moments = moments_.emplace_back();
    moments.param = &p;
    plan.declare(moments.m, p.spec.name + ".m", p.spec.shape, DType::f32, Life::optimizer);
    plan.declare(moments.v, p.spec.name + ".v", p.spec.shape, DType::f32, Life::optimizer);
  }
  plan.declare(sum_squares_1_, "grad_sum_squares", {1}, DType::f64, Life::metrics);
  plan.declare(norm_1_, "grad_norm", {1}, DType::f32, Life::metrics);
  plan.declare(scale_1_, "grad_scale", {1}, DType::f32, Life::metrics);
}

void Optimizer::reduce_gradients(Stream& s) const {
  for (const Moments& each : moments_) mesh_.group(each.param->spec.grad_axis).all_reduce_sum(s, each.param->dw);
}

void Optimizer::measure_norm(Stream& s, StepStack& stack) const {
  fill_zero(s, sum_squares_1_);
  for (const Moments& each : moments_) {
    const int64_t n = each.param->dw.numel();
    StackScope scope(stack);
    sum_squares(s, {.sum_1 = sum_squares_1_,
                    .partial_P = stack.take({SumSquares::num_partials(n)}, DType::f64),
                    .x_n = each.param->dw.view({n})});
  }
  clip_scale(s, {.norm_1 = norm_1_,
                 .scale_1 = scale_1_,
                 .sum_squares_1 = sum_squares_1_,
                 .clip = static_cast<float>(spec_.clip)});
}

void Optimizer::step(Stream& s, StepStack& stack, const OptimizerMove& move) const {
  reduce_gradients(s);
  measure_norm(s, stack);
  for (const Moments& each : moments_) {
    const Param& p = *each.param;
    const Shape flat{p.w.numel()};
    adamw(s, {.param_n = p.w.view(flat),
              .master_n = p.master().view(flat),
              .m_n = each.m.view(flat),
              .v_n = each.v.view(flat),
              .grad_n = p.dw.view(flat),
              .scale_1 = scale_1_,
              .schedule_2 = move.schedule_2,
              .lr = static_cast<float>(move.lr),
              .beta1 = static_cast<float>(spec_.beta1),
              .beta2 = static_cast<float>(spec_.beta2),
              .eps = static_cast<float>(spec_.eps),
              .weight_decay = p.spec.decay ? static_cast<float>(spec_.weight_decay) : 0.0f,
              .step = move.train_step});
  }
}

}  // namespace moebius
