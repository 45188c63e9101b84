#include "parallel/optim/adamw.h"

#include "ops/optimizer/optimizer.h"

namespace moebius {

AdamWOptimizer::AdamWOptimizer(const OptimizerSpec& spec, ParamTable& params, const Mesh& mesh, MemoryPlan& plan,
                               const ShardingSpec& sharding)
    : spec_(spec),
      buckets_(params, mesh, plan, sharding.bucket_numel),
      exchange_(buckets_, params, plan, sharding.overlap),
      norm_(mesh, plan, spec.clip) {
  const std::vector<ParamGroup> groups = param_groups(spec);
  for (const Param& p : params.all()) {
    if (!p.spec.trainable) continue;
    trained_.push_back(&p);
    Moments& moments = moments_.emplace_back();
    moments.param = &p;
    moments.weight_decay = group_of(groups, p.spec.kind).weight_decay;
    plan.declare(moments.m, p.spec.name + ".m", {p.owned.count}, DType::f32, Life::optimizer);
    plan.declare(moments.v, p.spec.name + ".v", {p.owned.count}, DType::f32, Life::optimizer);
  }
}

void AdamWOptimizer::update(Stream& s, const OptimizerStepArgs& args) const {
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
            .scale_1 = norm_.scale(),
            .schedule_2 = args.schedule_2,
            .lr = static_cast<float>(args.lr),
            .beta1 = static_cast<float>(spec_.beta1),
            .beta2 = static_cast<float>(spec_.beta2),
            .eps = static_cast<float>(spec_.eps),
            .step = args.train_step});
}

void AdamWOptimizer::step(Stream& s, StepStack& stack, const OptimizerStepArgs& args) {
  exchange_.reduce(s);
  norm_.measure(s, stack, trained_);
  update(s, args);
  exchange_.weights_changed(s);
}

void AdamWOptimizer::gather(Stream& s) {
  exchange_.weights_changed(s);
  exchange_.settle(s);
}

std::vector<OptimizerState> AdamWOptimizer::state() const {
  std::vector<OptimizerState> state;
  for (const Moments& each : moments_) {
    state.push_back({.prefix = kStatePrefixes[0], .param = each.param, .tensor = each.m});
    state.push_back({.prefix = kStatePrefixes[1], .param = each.param, .tensor = each.v});
  }
  return state;
}

}  // namespace moebius
