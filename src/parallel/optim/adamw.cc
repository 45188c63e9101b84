#include "parallel/optim/adamw.h"

#include "ops/optimizer/optimizer.h"

namespace moebius {

AdamWOptimizer::AdamWOptimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) : spec_(spec) {
  const std::vector<ParamGroup> groups = param_groups(spec);
  for (const Param& p : params.all()) {
    if (!p.spec.trainable) continue;
    Moments& moments = moments_.emplace_back();
    moments.param = &p;
    moments.weight_decay = group_of(groups, p.spec.kind).weight_decay;
    plan.declare(moments.m, p.spec.name + ".m", {p.owned.count}, DType::f32, Life::optimizer);
    plan.declare(moments.v, p.spec.name + ".v", {p.owned.count}, DType::f32, Life::optimizer);
  }
}

void AdamWOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  std::vector<AdamWTensors> tensors;
  for (const Moments& each : moments_) {
    const Param& p = *each.param;
    tensors.push_back({.param_n = owned_elements(p, p.w),
                       .master_n = p.master(),
                       .m_n = each.m,
                       .v_n = each.v,
                       .grad_n = owned_elements(p, p.dw),
                       .weight_decay = static_cast<float>(each.weight_decay)});
  }
  adamw(s, {.tensors = tensors,
            .scale_1 = args.scale_1,
            .lr_and_step_2 = args.lr_and_step_2,
            .lr = static_cast<float>(args.lr),
            .beta1 = static_cast<float>(spec_.beta1),
            .beta2 = static_cast<float>(spec_.beta2),
            .eps = static_cast<float>(spec_.eps),
            .step = args.train_step});
}

std::vector<OptimizerState> AdamWOptimizer::state() const {
  std::vector<OptimizerState> state;
  for (const Moments& each : moments_) {
    state.push_back({.prefix = kStatePrefixes[0], .param = each.param, .values = each.m});
    state.push_back({.prefix = kStatePrefixes[1], .param = each.param, .values = each.v});
  }
  return state;
}

}  // namespace moebius
