#include "parallel/optim/sgd.h"

#include "ops/optimizer/optimizer.h"

namespace moebius {

SgdOptimizer::SgdOptimizer(const OptimizerSpec& spec, const ParamTable& params, MemoryPlan& plan) : spec_(spec) {
  const std::vector<ParamGroup> groups = param_groups(spec);
  for (const Param& p : params.all()) {
    if (!p.spec.trainable) continue;
    Momentum& momentum = momenta_.emplace_back();
    momentum.param = &p;
    momentum.weight_decay = group_of(groups, p.spec.kind).weight_decay;
    if (spec.momentum != 0) plan.declare(momentum.m, p.spec.name + ".m", {p.owned.count}, DType::f32, Life::optimizer);
  }
}

void SgdOptimizer::update(Stream& s, StepStack&, const OptimizerStepArgs& args) {
  std::vector<SgdTensors> tensors;
  for (const Momentum& each : momenta_) {
    const Param& p = *each.param;
    tensors.push_back({.param_n = owned_elements(p, p.w),
                       .master_n = p.master(),
                       .m_n = each.m,
                       .grad_n = owned_elements(p, p.dw),
                       .weight_decay = static_cast<float>(each.weight_decay)});
  }
  sgd(s, {.tensors = tensors,
          .scale_1 = args.scale_1,
          .lr_and_step_2 = args.lr_and_step_2,
          .lr = static_cast<float>(args.lr),
          .momentum = static_cast<float>(spec_.momentum)});
}

std::vector<OptimizerState> SgdOptimizer::state() const {
  std::vector<OptimizerState> state;
  if (spec_.momentum == 0) return state;
  for (const Momentum& each : momenta_)
    state.push_back({.prefix = kStatePrefixes[0], .param = each.param, .values = each.m});
  return state;
}

}  // namespace moebius
