#include "model/moe/moe.h"

namespace moebius {
namespace {

// With tp above 1 the shared expert exchanges rows too, and two exchanges by messages must not overlap.
bool overlaps_shared_expert(const LayerContext& c) {
  const bool is_alone = c.mesh.shape().tp == 1 || c.dispatcher == DispatcherKind::direct;
  return c.expert_overlap != ExpertOverlap::none && is_alone;
}

}  // namespace

Moe::Moe(const LayerContext& c, const std::string& prefix, int64_t layer)
    : router_(c, prefix + ".gate", layer),
      experts_(make_routed_experts(c, prefix)),
      overlaps_shared_(overlaps_shared_expert(c)) {
  if (c.model.shared_intermediate_size > 0) shared_.emplace(c, prefix);
}

void Moe::declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const {
  router_.declare_saved(plan, prefix + ".router", saved.router);
  saved.experts = experts_->declare_saved(plan, prefix);
  if (shared_) shared_->declare_saved(plan, prefix, saved.shared);
}

void Moe::forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const {
  const Route route = router_.forward(step, x_TD, saved.router);
  if (!shared_) return experts_->forward(step, y_TD, x_TD, route, *saved.experts);
  if (!overlaps_shared_) experts_->forward(step, y_TD, x_TD, route, *saved.experts);
  StackScope scope(step.stack);
  const Tensor shared_TD = shared_->open(step, x_TD, saved.shared);
  const auto shared = [&] { shared_->mlp(step, shared_TD, x_TD, saved.shared); };
  if (overlaps_shared_)
    experts_->forward(step, y_TD, x_TD, route, *saved.experts, shared);
  else
    shared();
  shared_->add_to(step, y_TD, shared_TD, x_TD, saved.shared);
}

// One token may have its experts chosen by the kernels of the experts.
void Moe::forward_normed(Step& step, Tensor y_TD, const RmsNormFwd& norm, Saved& saved) const {
  if (shared_ || !router_.takes_normed(step, norm)) {
    rms_norm_fwd(step.stream, norm);
    return forward(step, y_TD, norm.y_TD, saved);
  }
  const RouteFwd choose = router_.normed_logits(step, norm, saved.router);
  if (experts_->forward_token(step, y_TD, norm.y_TD, choose, *saved.experts)) return;
  experts_->forward(step, y_TD, norm.y_TD, router_.choose(step, choose), *saved.experts);
}

void Moe::recompute(Step& step, Tensor x_TD, Saved& saved) const {
  saved.router.x_TD = x_TD;
  experts_->recompute(step, x_TD, *saved.experts);
  if (shared_) shared_->recompute(step, x_TD, saved.shared);
}

void Moe::backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const Tensor dweight_TK = step.alloc(saved.router.route.weight_TK.shape, DType::f32);
  experts_->backward_input(step, dx_TD, dweight_TK, dy_TD, *saved.experts);
  router_.backward(step, dx_TD, dweight_TK, saved.router);
  if (shared_) shared_->backward_input(step, dx_TD, dy_TD, saved.shared);
}

void Moe::backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const {
  const Tensor dweight_TK = step.alloc(saved.router.route.weight_TK.shape, DType::f32);
  const auto shared = [&] {
    shared_->backward_hidden(step, dy_TD, saved.shared);
    shared_->backward_weight(step, saved.shared);
  };
  const bool overlaps = shared_ && overlaps_shared_ && !shared_->is_chunked();
  experts_->backward(step, dx_TD, dweight_TK, dy_TD, *saved.experts,
                     overlaps ? RoutedExperts::ConcurrentWork(shared) : RoutedExperts::ConcurrentWork());
  router_.backward(step, dx_TD, dweight_TK, saved.router);
  if (!shared_) return;
  if (overlaps) return shared_->backward_x(step, dx_TD, saved.shared);
  shared_->backward_input(step, dx_TD, dy_TD, saved.shared);
  shared_->backward_weight(step, saved.shared);
}

void Moe::backward_weight(Step& step, const Saved& saved) const {
  experts_->backward_weight(step, *saved.experts);
  if (shared_) shared_->backward_weight(step, saved.shared);
}

std::vector<KeptTensor> Moe::kept(const Saved& saved) {
  std::vector<KeptTensor> kept{{"router logits", saved.router.logits_TE},
                               {"router weights", saved.router.route.weight_TK}};
  const std::vector<KeptTensor> shared = SharedExpert::kept(saved.shared);
  kept.insert(kept.end(), shared.begin(), shared.end());
  return kept;
}

}  // namespace moebius
