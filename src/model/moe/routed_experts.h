// The experts of an MoE layer that tokens are routed to, chosen once when the layer is made.
//   y[t] = sum over the chosen e of weight[t,e] * (W2_e activation(W1_e x[t] + b1_e) + b2_e)
// There are biases, and the activation of gpt-oss, where the family has them. Moe sees only this
// interface. How rows travel to the experts, and which products are fused with that, is the
// business of each implementation.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "memory/plan.h"
#include "model/layer_context.h"
#include "ops/routing/routing.h"

namespace moebius {

class RoutedExperts {
 public:
  // The tensors that forward leaves for the backward passes of a micro-batch. Each implementation
  // has its own.
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~RoutedExperts() = default;
  // The calls below need a struct that this kind of experts returned; std::bad_cast for another.
  virtual std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  // All ranks of etp x ep make the same calls. x, y: [T, D].
  // concurrent: work that may run beside the rows on their way to the experts; it is run once. It may not use y.
  using ConcurrentWork = std::function<void()>;
  virtual void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, Saved& saved,
                       const ConcurrentWork& concurrent) const = 0;
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, Saved& saved) const {
    forward(step, y_TD, x_TD, route, saved, nullptr);
  }
  // Call it before a backward pass, with the same x. What forward did not keep is recomputed here or
  // in backward_input.
  virtual void recompute(Step& step, Tensor x_TD, Saved& saved) const = 0;
  // Writes dx, and the derivative w.r.t. the route's weights (f32).
  virtual void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, Saved& saved) const = 0;
  // Adds to the gradients of the experts' weights and biases.
  virtual void backward_weight(Step& step, const Saved& saved) const = 0;
  // Both, with the same bits. With parallel.expert_overlap products run beside the rows on their way, and concurrent
  // beside those of dy; it may not use dx.
  virtual void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, Saved& saved,
                        const ConcurrentWork& concurrent) const = 0;
};

// The routed experts of a layer of c.model, whose parameters begin with prefix. Those of a long
// micro-batch take it in chunks (model/moe/chunked_experts.h). Error{usage} with the
// equation unless ep divides the experts and etp their inner width.
std::unique_ptr<RoutedExperts> make_routed_experts(const LayerContext& c, const std::string& prefix);

}  // namespace moebius
