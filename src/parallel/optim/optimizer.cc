#include "parallel/optim/optimizer.h"

#include "ops/elementwise/elementwise.h"
#include "ops/optimizer/optimizer.h"

namespace moebius {
namespace {

Tensor owned_elements(const Param& p, const Tensor& t) {
  return t.view({t.numel()}).rows(p.owned.begin, p.owned.end());
}

}  // namespace

Optimizer::Optimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                     const ShardingSpec& sharding)
    : spec_(spec),
      mesh_(mesh),
      buckets_(params, mesh, plan, sharding.bucket_numel),
      exchange_(buckets_, params, plan, sharding.overlap) {
  for (const Param& p : params.all()) {
    if (!p.spec.trainable) continue;
    Moments& moments = moments_.emplace_back();
    moments.param = &p;
    plan.declare(moments.m, p.spec.name + ".m", {p.owned.count}, DType::f32, Life::optimizer);
    plan.declare(moments.v, p.spec.name + ".v", {p.owned.count}, DType::f32, Life::optimizer);
  }
  plan.declare(sum_squares_1_, "grad_sum_squares", {1}, DType::f64, Life::metrics);
  plan.declare(norm_1_, "grad_norm", {1}, DType::f32, Life::metrics);
  plan.declare(scale_1_, "grad_scale", {1}, DType::f32, Life::metrics);
}

// Every element of the model is owned by one rank, but for a tied copy: without
// those the sum over the world has each square once.
void Optimizer::measure_norm(Stream& s, StepStack& stack) const {
  fill_zero(s, sum_squares_1_);
  std::vector<Tensor> gradients;
  for (const Moments& each : moments_)
    if (!each.param->spec.tied_copy) gradients.push_back(owned_elements(*each.param, each.param->dw));
  StackScope scope(stack);
  sum_squares(s, {.sum_1 = sum_squares_1_,
                  .partial_P = stack.alloc({SumSquares::num_partials(gradients)}, DType::f64),
                  .x = gradients});
  mesh_.group(Axis::world).all_reduce_sum(s, sum_squares_1_);
  clip_scale(s, {.norm_1 = norm_1_,
                 .scale_1 = scale_1_,
                 .sum_squares_1 = sum_squares_1_,
                 .clip = static_cast<float>(spec_.clip)});
}

void Optimizer::update(Stream& s, const OptimizerStepArgs& move) const {
  std::vector<AdamWTensors> tensors;
  for (const Moments& each : moments_) {
    const Param& p = *each.param;
    tensors.push_back({.param_n = owned_elements(p, p.w),
                       .master_n = p.master(),
                       .m_n = each.m,
                       .v_n = each.v,
                       .grad_n = owned_elements(p, p.dw),
                       .weight_decay = p.spec.decay ? static_cast<float>(spec_.weight_decay) : 0.0f});
  }
  adamw(s, {.tensors = tensors,
            .scale_1 = scale_1_,
            .schedule_2 = move.schedule_2,
            .lr = static_cast<float>(move.lr),
            .beta1 = static_cast<float>(spec_.beta1),
            .beta2 = static_cast<float>(spec_.beta2),
            .eps = static_cast<float>(spec_.eps),
            .step = move.train_step});
}

void Optimizer::step(Stream& s, StepStack& stack, const OptimizerStepArgs& move) {
  exchange_.reduce(s);
  measure_norm(s, stack);
  update(s, move);
  exchange_.weights_changed(s);
}

}  // namespace moebius
