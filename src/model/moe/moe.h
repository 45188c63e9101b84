// A Mixture-of-Experts layer: route, dispatch, compute, combine, and a shared expert beside it.
//   y[t] = sum over the chosen e of weight[t,e] * (W2_e activation(W1_e x[t] + b1_e) + b2_e)
//          (+ shared(x[t]), gated by sigmoid(x w_g))
// with biases, the activation of gpt-oss and the shared expert where the family has them.
// Kept for backward: x (the caller's), H (pre-activation rows) and the route. Neither the experts' outputs nor their
// gradients are stored.
#pragma once

#include <memory>
#include <optional>

#include "model/layers/mlp.h"
#include "model/moe/dispatcher.h"
#include "model/moe/router.h"
#include "ops/experts/experts.h"

namespace moebius {

class Moe {
 public:
  struct Saved {
    Router::Saved router;
    Delivery delivery;
    Tensor x_TD;  // the caller's
    SavedTensor h_R2F;
    Mlp::Saved shared;
    SavedTensor shared_y_TD;  // only with a shared gate,
    Tensor gate_T;            // as this
    // Left by backward_input for backward_weight, on the step stack:
    Dispatched tokens, grads;  // rows of x, and of dy
    Tensor dh_R2F, sa_RF, dgate_T;
  };
  // dispatcher: "auto", "allgather" or "alltoall"; fusion: of the shared expert, as in model/layers/mlp.h. Error{usage} with
  // the equation unless ep divides the experts and etp their inner width.
  Moe(ParamTable& params, MemoryPlan& plan, const std::string& prefix, const ModelSpec& model,
      const BalanceSpec& balance, DType dtype, const Mesh& mesh, const BatchShape& shape, uint32_t layer, uint64_t seed,
      const std::string& dispatcher = "auto", bool fusion = true);
  void declare_saved(MemoryPlan& plan, const std::string& prefix, Saved& saved) const;

  void forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  // Before backward_input: x as it was, and what was not kept once more. The route is always kept.
  void remake(Step& step, Tensor x_TD, Saved& saved) const;
  void backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;  // adds the router's gradients
  void backward_weight(Step& step, const Saved& saved) const;

  const Router& router() const { return router_; }

 private:
  void experts_forward(Step& step, Tensor y_TD, Saved& saved) const;
  void experts_backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Saved& saved) const;
  void expert_up(Step& step, Tensor a_RF, const Dispatched& in, const Saved& saved) const;  // h, and a = swiglu(h)
  void shared_forward(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved) const;
  void shared_backward_input(Step& step, Tensor dx_TD, Tensor dy_TD, Saved& saved) const;

  void bias_gradients(Step& step, const Saved& saved) const;

  int64_t D_, F_, max_tokens_;  // F of a shard
  DType dtype_;
  Router router_;
  const Param &w1_, &w2_;  // [e, 2F, D], [e, D, F]
  // [e, 2F], [e, C]. The outputs of expert shards are summed, so each shard has its share of the columns of b2.
  const Param *b1_ = nullptr, *b2_ = nullptr;
  int64_t b2_first_ = 0;
  GatedActivation activation_;
  std::unique_ptr<Dispatcher> dispatcher_;
  std::optional<Mlp> shared_;
  std::optional<Linear> shared_gate_;
};

}  // namespace moebius
