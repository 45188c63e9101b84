// The interface of the routed experts of an MoE layer:
//   y[t] = sum over the chosen e of weight[t,e] * (W2_e activation(W1_e x[t] + b1_e) + b2_e)
// Biases, and the activation of gpt-oss, depend on the model family. Moe uses only this interface, so an implementation
// decides how rows reach the experts, and which products it fuses with that.
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
  // The tensors that forward saves for the backward passes of a micro-batch. Each implementation derives its own.
  struct Saved {
    virtual ~Saved() = default;
  };
  virtual ~RoutedExperts() = default;
  // The calls below REQUIRE a Saved that this implementation returned; std::bad_cast otherwise.
  virtual std::unique_ptr<Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const = 0;

  // All ranks of etp x ep make the same calls. x, y: [T, D].
  // concurrent: work that may overlap with the exchange of rows; it runs once, and must not use y.
  using ConcurrentWork = std::function<void()>;
  virtual void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, Saved& saved,
                       const ConcurrentWork& concurrent) const = 0;
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, Saved& saved) const {
    forward(step, y_TD, x_TD, route, saved, nullptr);
  }
  // Call it before a backward pass, with the same x. What forward did not save is recomputed here or in backward_input.
  virtual void recompute(Step& step, Tensor x_TD, Saved& saved) const = 0;
  // Writes dx, and dweight (f32), the derivative w.r.t. the route's weights.
  virtual void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, Saved& saved) const = 0;
  // Adds to the gradients of the experts' weights and biases.
  virtual void backward_weight(Step& step, const Saved& saved) const = 0;
  // Runs both backward passes, with the same bits. With parallel.expert_overlap products overlap with the exchange of
  // rows, and `concurrent` with that of dy; it must not use dx.
  virtual void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, Saved& saved,
                        const ConcurrentWork& concurrent) const = 0;

  // Chooses the experts of one token in generation, and runs forward() for it, if the GPU has kernels for both. Else
  // it does nothing, and returns false. choose: the arguments of the choice, without scratch.
  virtual bool forward_token(Step&, Tensor, Tensor, const RouteFwd&, Saved&) const { return false; }
};

// Makes the routed experts of a layer of c.model. The names of their parameters begin with prefix. For a long
// micro-batch they are chunked (model/moe/chunked_experts.h). Throws Error{usage} with the equation unless ep divides
// the experts and etp divides their inner width.
std::unique_ptr<RoutedExperts> make_routed_experts(const LayerContext& c, const std::string& prefix);

}  // namespace moebius
