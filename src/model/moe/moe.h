// A Mixture-of-Experts layer: a router, the experts that it routes tokens to, and a shared expert.
//   y[t] = routed(x[t]) + shared(x[t])
// routed is an interface (model/moe/routed_experts.h). The shared expert exists only in families that have one.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "model/moe/routed_experts.h"
#include "model/moe/router/router.h"
#include "model/moe/shared_expert.h"

namespace moebius {

class Moe {
 public:
  struct Saved {
    Router::Saved router;
    std::unique_ptr<RoutedExperts::Saved> experts;
    SharedExpert::Saved shared;
  };
  // layer: its index in the model. Throws Error{usage} as make_routed_experts() says.
  Moe(const LayerContext& c, const std::string& prefix, int64_t layer);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  // The methods of FeedForward. The route is always kept.
  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void forward_normed(Step& step, Tensor y_TD, const RmsNormFwd& norm, Saved& saved) const;
  void recompute(Step& step, Tensor x_TD, Saved& saved) const;
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // adds the router's gradients
  void backward_weight(Step& step, const Saved& saved) const;
  void backward(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // both passes, with the same bits
  static std::vector<KeptTensor> kept(const Saved& saved);

  const Router& router() const { return router_; }

 private:
  Router router_;
  std::unique_ptr<RoutedExperts> experts_;
  std::optional<SharedExpert> shared_;
  bool overlaps_shared_;  // whether the shared expert overlaps with the exchange of rows
};

}  // namespace moebius
