// Routed experts as separate calls: dispatch, both products, combine. A Dispatcher moves the rows.
// Kept for backward: x (the caller's), h (pre-activation rows) and the delivery. Neither the
// experts' outputs nor their gradients are stored.
#pragma once

#include <memory>

#include "memory/saved_tensor.h"
#include "memory/wgrad_input.h"
#include "model/layers/precision_of.h"
#include "model/lora/adapter.h"
#include "model/moe/dispatcher.h"
#include "model/moe/expert_rows.h"
#include "model/moe/routed_experts.h"
#include "model/moe/wire_rows.h"
#include "ops/experts/experts.h"

namespace moebius {

class DispatchedExperts final : public RoutedExperts {
 public:
  struct Saved final : RoutedExperts::Saved {
    std::unique_ptr<Delivery> delivery;
    Tensor x_TD;  // the caller's
    SavedTensor h_R2F;
    ExpertRows::Held held;  // with a budget of rows
    // Rows of x and of dy as they arrived for the backward: their sources, row indices and weights.
    Rows token_rows, grad_rows;
    WgradInput tokens, grads, weight_R;
    WgradInput dh_R2F, sa_RF;  // derivative w.r.t. h; the activation, scaled by the row's weight
    // Where the weights have adapters: A x of W1's, and B^T dy of both.
    SavedTensor w1_low;
    WgradInput w1_low_of_dw, w1_dlow, w2_dlow;
    // With dropout of the adapters: the token of each row of the source, in the global batch. i32.
    Tensor token_index_N;
  };
  // max_tokens: of a call. Error{usage} as make_routed_experts() says.
  DispatchedExperts(const LayerContext& c, const std::string& prefix, int64_t max_tokens);
  std::unique_ptr<RoutedExperts::Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;

  using RoutedExperts::forward;
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& saved,
               const ConcurrentWork& concurrent) const override;
  // h is recomputed in backward_input, which dispatches x anyway.
  void recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& saved) const override;
  void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                      RoutedExperts::Saved& saved) const override;
  void backward_weight(Step& step, const RoutedExperts::Saved& saved) const override;
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& saved,
                const ConcurrentWork& concurrent) const override;

  // The tensors of this kind; std::bad_cast for those of another.
  static Saved& own(RoutedExperts::Saved& saved) { return dynamic_cast<Saved&>(saved); }
  static const Saved& own(const RoutedExperts::Saved& saved) { return dynamic_cast<const Saved&>(saved); }

 private:
  void up(Step& step, Tensor a_RF, const Dispatched& in, const Saved& saved) const;  // h, and a = activation(h)
  void down(Step& step, Tensor y_RD, Tensor a_RF, const Dispatched& in, const Saved& saved) const;
  // Where adapters drop elements: the tokens of the rows that dispatch() brought, and those of such rows.
  void find_tokens(Step& step, int64_t T, Saved& saved) const;
  Adapter::Tokens tokens(Step& step, const Rows& rows, const Saved& saved) const;
  // Where the rows of the layer that runs are: on the step stack, or in the memory of a budget.
  void open_h(Step& step, Saved& saved) const;
  void open_gradients(Step& step, Saved& saved) const;
  Tensor activations(Step& step, int64_t R) const;
  Tensor outputs(Step& step, int64_t R) const;
  void bring_back_h(Step& step, const Dispatched& tokens, Saved& saved) const;
  void run_backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, Saved& saved, bool with_weights,
                    const ConcurrentWork& concurrent) const;
  // The dispatcher's calls; rows may travel in 8 bits.
  Dispatched dispatch(Step& step, const Tensor& x_TD, Saved& saved) const;
  Dispatched dispatch_grads(Step& step, const Tensor& dy_TD, Saved& saved) const;
  // The rows of x at the experts; where h was not kept it is recomputed of them.
  void hold_tokens(Step& step, const Dispatched& tokens, Saved& saved) const;
  // Brings the rows of dy to the experts. Returns the weight of each row.
  Tensor receive_grads(Step& step, Tensor dy_TD, Saved& saved) const;
  // From dy to h, and from there to x.
  void backward_down(Step& step, Tensor dweight_R, Tensor weight_R, Saved& saved) const;
  void backward_up(Step& step, Tensor dx_RD, Saved& saved) const;
  // Adds what the gradients of rows get through the adapter of W2, unless d_expert_down has added it.
  void adapted_down_bwd(Step& step, Tensor dweight_R, Tensor weight_R, const Saved& saved, bool is_added) const;
  Adapter::Input down_input(Step& step, Tensor g_RF, const Saved& saved) const;
  void down_gradient(Step& step, const Saved& saved) const;
  void up_gradient(Step& step, const Saved& saved) const;
  void bias_gradients(Step& step, const Saved& saved) const;

  int64_t D_, F_, max_tokens_;  // F of a shard
  DType dtype_;
  bool is_inference_, overlaps_;
  const Param &w1_, &w2_;
  ProductPrecision w1_precision_, w2_precision_;
  WeightOperands w1_operands_, w2_operands_;
  Adapter w1_adapter_, w2_adapter_;
  const Param *b1_ = nullptr, *b2_ = nullptr;
  int64_t b2_first_ = 0;
  bool has_dropout_ = false;
  GatedActivation activation_;
  const ExpertRows* rows_;  // null: without a budget
  std::unique_ptr<Dispatcher> dispatcher_;
  WireRows wire_;
};

}  // namespace moebius
