#include "model/moe/moe.h"

#include "ops/elementwise/elementwise.h"

namespace moebius {
namespace {

// With tp above 1 the shared expert exchanges rows too, and two exchanges by messages must not overlap.
bool overlaps_shared_expert(const LayerContext& c) {
  const bool is_alone = c.mesh.shape().tp == 1 || c.dispatcher == DispatcherKind::direct;
  return c.expert_overlap != ExpertOverlap::none && is_alone;
}

}  // namespace

Moe::Moe(const LayerContext& c, const std::string& prefix, int64_t layer)
    : D_(c.model.hidden_size),
      max_tokens_(c.stream_rows()),
      dtype_(c.dtype),
      router_(c, prefix + ".gate", layer),
      experts_(make_routed_experts(c, prefix)),
      overlaps_shared_(overlaps_shared_expert(c)) {
  if (c.model.shared_intermediate_size == 0) return;
  shared_.emplace(c, prefix + ".shared_experts", c.model.shared_intermediate_size);
  if (!c.model.shared_expert_gate) return;
  shared_gate_.emplace(c.params, ParamSpec{.name = prefix + ".shared_expert_gate.weight",
                                           .shape = {1, D_},
                                           .dtype = dtype_,
                                           .init_std = c.init_std(),
                                           .grad_axis = Axis::tp_cp_dp});
}

void Moe::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  router_.declare_saved(plan, prefix + ".router", saved.router);
  saved.experts = experts_->declare_saved(plan, prefix);
  constexpr auto kShared = &RecomputeSpec::shared_expert;
  if (shared_) shared_->declare_saved(plan, prefix + ".shared", saved.shared, kShared);
  if (!shared_gate_) return;
  saved.shared_y_TD.declare(plan, prefix + ".shared_y", {max_tokens_, D_}, dtype_, kShared);
  plan.declare(saved.gate_T, prefix + ".shared_gate", {max_tokens_}, DType::f32, Life::saved);
  saved.dgate_T.declare(plan, prefix + ".dshared_gate", {max_tokens_, 1}, dtype_);
}

void Moe::forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  saved.x_TD = x_TD;
  const Route route = router_.forward(step, x_TD, saved.router);
  if (!shared_) return experts_->forward(step, y_TD, x_TD, route, *saved.experts);
  if (!overlaps_shared_) experts_->forward(step, y_TD, x_TD, route, *saved.experts);
  StackScope scope(step.stack);
  saved.shared_y_TD.open(step.stack);
  const Tensor shared_TD = shared_gate_ ? saved.shared_y_TD.rows(0, x_TD.dim(0)) : step.alloc(x_TD.shape, dtype_);
  const auto shared = [&] { shared_->forward(step, shared_TD, x_TD, saved.shared); };
  if (overlaps_shared_)
    experts_->forward(step, y_TD, x_TD, route, *saved.experts, shared);
  else
    shared();
  add_shared(step, y_TD, shared_TD, x_TD, saved);
}

void Moe::add_shared(Step& step, Tensor y_TD, Tensor shared_TD, Tensor x_TD, const Saved& saved) const {
  if (!shared_gate_) return add(step.stream, y_TD, shared_TD);
  const int64_t T = x_TD.dim(0);
  const Tensor gate_T = saved.gate_T.rows(0, T);
  shared_gate_->forward(step, gate_T.view({T, 1}), x_TD);
  gated_add_fwd(step.stream, {.y_TD = y_TD, .x_TD = shared_TD, .gate_T = gate_T});
}

void Moe::recompute(Step& step, Tensor x_TD, Saved& saved) const {
  saved.x_TD = saved.router.x_TD = x_TD;
  experts_->recompute(step, x_TD, *saved.experts);
  if (!shared_) return;
  shared_->recompute(step, x_TD, saved.shared);
  saved.shared_y_TD.recompute(step.stack, [&] { shared_->output(step, saved.shared_y_TD, saved.shared); });
}

void Moe::backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const Tensor dweight_TK = step.alloc(saved.router.route.weight_TK.shape, DType::f32);
  experts_->backward_input(step, dx_TD, dweight_TK, dy_TD, *saved.experts);
  router_.backward(step, dx_TD, dweight_TK, saved.router);
  shared_backward_hidden(step, dy_TD, saved);
  shared_backward_x(step, dx_TD, saved);
}

void Moe::backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const Tensor dweight_TK = step.alloc(saved.router.route.weight_TK.shape, DType::f32);
  const auto shared = [&] {
    shared_backward_hidden(step, dy_TD, saved);
    shared_backward_weight(step, saved);
  };
  const bool overlaps = shared_ && overlaps_shared_;
  experts_->backward(step, dx_TD, dweight_TK, dy_TD, *saved.experts,
                     overlaps ? RoutedExperts::ConcurrentWork(shared) : RoutedExperts::ConcurrentWork());
  router_.backward(step, dx_TD, dweight_TK, saved.router);
  if (!overlaps) shared();
  shared_backward_x(step, dx_TD, saved);
}

void Moe::shared_backward_hidden(Step& step, Tensor dy_TD, Saved& saved) const {
  if (!shared_) return;
  if (!shared_gate_) return shared_->backward_hidden(step, dy_TD, saved.shared);
  const int64_t T = dy_TD.dim(0);
  const Tensor dshared_TD = step.alloc({T, D_}, dtype_), dgate_T = step.alloc({T}, DType::f32);
  gated_add_bwd(
      step.stream,
      {.dx_TD = dshared_TD, .dgate_T = dgate_T, .dy_TD = dy_TD, .x_TD = saved.shared_y_TD, .gate_T = saved.gate_T});
  shared_->backward_hidden(step, dshared_TD, saved.shared);
  saved.dgate_T.open(step.stack);
  copy(step.stream, saved.dgate_T, dgate_T.view({T, 1}));
}

void Moe::shared_backward_x(Step& step, Tensor dx_TD, Saved& saved) const {
  if (shared_) shared_->backward_x(step, dx_TD, saved.shared, /*accumulate_dx=*/true);
  if (shared_gate_) shared_gate_->backward_input(step, dx_TD, saved.dgate_T, /*accumulate=*/true);
}

void Moe::backward_weight(Step& step, const Saved& saved) const {
  experts_->backward_weight(step, *saved.experts);
  shared_backward_weight(step, saved);
}

void Moe::shared_backward_weight(Step& step, const Saved& saved) const {
  if (shared_) shared_->backward_weight(step, saved.shared);
  if (shared_gate_) shared_gate_->backward_weight(step, saved.dgate_T, saved.x_TD);
}

std::vector<KeptTensor> Moe::kept(const Saved& saved) {
  return {{"router logits", saved.router.logits_TE},
          {"router weights", saved.router.route.weight_TK},
          {"shared expert pre-activation", saved.shared.h_T2F.kept()}};
}

}  // namespace moebius
