// A Mixture-of-Experts layer: a router, the experts that it routes tokens to, and a shared expert.
//   y[t] = routed(x[t]) + shared(x[t])
// routed is an interface (model/moe/routed_experts.h); shared may be gated by sigmoid(x w_g).
// The shared expert and its gate exist only in families that have them.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/layers/mlp.h"
#include "model/moe/routed_experts.h"
#include "model/moe/router.h"

namespace moebius {

class Moe {
 public:
  struct Saved {
    Router::Saved router;
    std::unique_ptr<RoutedExperts::Saved> experts;
    Mlp::Saved shared;
    Tensor x_TD;              // the caller's
    SavedTensor shared_y_TD;  // only with a shared gate
    Tensor gate_T;            // only with a shared gate
    WgradInput dgate_T;       // the derivative w.r.t. the gate
  };
  // layer: its index in the model. Throws Error{usage} as make_routed_experts() says.
  Moe(const LayerContext& c, const std::string& prefix, int64_t layer);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The methods of FeedForward. The route is always kept.
  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void recompute(Step& step, Tensor x_TD, Saved& saved) const;
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // adds the router's gradients
  void backward_weight(Step& step, const Saved& saved) const;
  void backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // both
  static std::vector<KeptTensor> kept(const Saved& saved);

  const Router& router() const { return router_; }

 private:
  void add_shared(Step& step, Tensor y_TD, Tensor shared_TD, Tensor x_TD, const Saved& saved) const;
  // The shared expert's backward pass: the part that needs only dy, and what it adds to dx.
  void shared_backward_hidden(Step& step, Tensor dy_TD, Saved& saved) const;
  void shared_backward_x(Step& step, Tensor dx_TD, Saved& saved) const;
  void shared_backward_weight(Step& step, const Saved& saved) const;

  int64_t D_, max_tokens_;
  DType dtype_;
  Router router_;
  std::unique_ptr<RoutedExperts> experts_;
  std::optional<Mlp> shared_;
  std::optional<Linear> shared_gate_;
  bool overlaps_shared_;  // the shared expert overlaps with the exchange of rows
};

}  // namespace moebius
