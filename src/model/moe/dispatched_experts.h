// Routed experts as separate calls: dispatch, two grouped products, combine. A Dispatcher moves the rows.
// Saved for backward: x (the caller's tensor), h (the pre-activation rows) and the handle. Neither the outputs of the
// experts nor their gradients are saved.
#pragma once

#include <memory>

#include "memory/saved_tensor.h"
#include "memory/wgrad_input.h"
#include "model/layers/pre_activation.h"
#include "model/layers/precision_of.h"
#include "model/lora/adapter.h"
#include "model/moe/dispatcher.h"
#include "model/moe/expert_rows.h"
#include "model/moe/routed_experts.h"
#include "model/moe/wire_rows.h"
#include "model/side_work.h"
#include "ops/experts/experts.h"

namespace moebius {

class DispatchedExperts final : public RoutedExperts {
 public:
  struct Saved final : RoutedExperts::Saved {
    std::unique_ptr<DispatchHandle> handle;
    Tensor x_TD;   // the caller's
    Tensor dy_TD;  // the caller's, in the backward pass
    PreActivation h_R2F;
    ExpertRows::Held held;  // used with a budget of rows
    Tensor h_bwd_R2F;       // h as backward_down reads it; empty if the op reads it in 8 bits
    // For backward_weight: the rows of x and dy at the experts, with their indices and weights.
    Rows token_rows, grad_rows;
    WgradInput tokens, grads, weight_R;
    WgradInput dh_R2F, sa_RF;  // derivative w.r.t. h; the activation, scaled by the row's weight
    // With emits_quantised_, dh_rows is dh as the operand of backward_up. With has_columns the others are the
    // transposes of dh and sa, in place of the tensors: operands of weight gradients are quantised, and these follow
    // at once.
    Operand dh_rows, dh_columns, sa_columns;
    bool has_columns = false;
    // With adapters: A x of W1's adapter, and B^T dy of both adapters.
    SavedTensor w1_low;
    WgradInput w1_low_of_dw, w1_dlow, w2_dlow;
    // With dropout in the adapters, or a recipe that draws by tokens: the index in the global batch of the token of
    // each row of the source, i32.
    Tensor token_index_N;
  };
  // max_tokens: the maximum T of a call. Throws the errors of make_routed_experts().
  DispatchedExperts(const LayerContext& c, const std::string& prefix, int64_t max_tokens);
  std::unique_ptr<RoutedExperts::Saved> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;

  using RoutedExperts::forward;
  void forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& saved,
               const ConcurrentWork& concurrent) const override;
  bool forward_token(Step& step, Tensor y_1D, Tensor x_1D, const RouteFwd& choose,
                     RoutedExperts::Saved& saved) const override;
  // Only stores x: backward_input recomputes h, since it dispatches x anyway.
  void recompute(Step& step, Tensor x_TD, RoutedExperts::Saved& saved) const override;
  void backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                      RoutedExperts::Saved& saved) const override;
  void backward_weight(Step& step, const RoutedExperts::Saved& saved) const override;
  void backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& saved,
                const ConcurrentWork& concurrent) const override;

  // Return `saved` as that of this kind of experts. They throw std::bad_cast for another kind.
  static Saved& own(RoutedExperts::Saved& saved) { return dynamic_cast<Saved&>(saved); }
  static const Saved& own(const RoutedExperts::Saved& saved) { return dynamic_cast<const Saved&>(saved); }

 private:
  // Computes h, and a = activation(h), of the rows of `in`, or of a part of them.
  void up(Step& step, Tensor a_RF, const Dispatched& in, const Saved& saved, const RowPart& part = {}) const;
  void down(Step& step, Tensor y_RD, Tensor a_RF, const Dispatched& in, const Saved& saved,
            const RowPart& part = {}) const;
  // find_tokens() sends the indices of tokens to the experts, if anything is drawn by these. tokens() returns them by
  // row, for adapters.
  void find_tokens(Step& step, int64_t T, Saved& saved) const;
  // Return the groups of rows for the quantisation of an operand: of one that is read in place; of one that is
  // transposed, with rows sorted by expert; and of one whose rows are gathered too. Rows that are read by token are
  // all present; otherwise the last offset gives their number. own_TD: the rows that this rank sends, also those that
  // no expert gets. The largest magnitude of the operand is theirs, and statistics count them, whatever rows arrive
  // at this rank.
  RowGroups in_place(Step& step, const Rows& rows, const Saved& saved, const Tensor& own_TD) const;
  RowGroups by_expert(const Step& step, const Rows& rows, const Saved& saved) const;
  RowGroups gathered(const Step& step, const Rows& rows, const Saved& saved) const;
  bool finds_batches(const Step& step) const;  // whether these groups have the tokens of rows
  Adapter::Tokens tokens(Step& step, const Rows& rows, const Saved& saved) const;
  // Open the rows of the running layer: on the step stack, or in the memory of ExpertRows.
  void open_h(Step& step, Saved& saved) const;
  void open_gradients(Step& step, Saved& saved) const;
  Tensor activations(Step& step, int64_t R) const;
  Tensor outputs(Step& step, int64_t R) const;
  // Recomputes h from the rows of x, if it was not saved. Joins `coming`, which sends these rows, before it reads any.
  void unstash_h(Step& step, const Dispatched& tokens, Saved& saved, SideWork& coming) const;
  struct BackwardTensors {
    Tensor dx_TD, dweight_TK;  // out
    Tensor dy_TD;              // in
  };
  // The common code of backward() and backward_input(). with_weights: also computes the gradients of weights, which
  // overlap with the exchange of dx.
  void run_backward(Step& step, const BackwardTensors& d, Saved& saved, bool with_weights,
                    const ConcurrentWork& concurrent) const;
  // Returns the number of multiprocessors for rows whose sending overlaps with products.
  int sending_multiprocessors(const Step& step, const Saved& saved) const;
  // The dispatcher's calls; rows may be sent in 8 bits.
  Dispatched dispatch(Step& step, const Tensor& x_TD, Saved& saved) const;
  Dispatched dispatch_grads(Step& step, const Tensor& dy_TD, Saved& saved) const;
  // forward() between announce and the end of combine, with batch_split.
  void forward_in_parts(Step& step, Tensor y_TD, Tensor x_TD, Saved& saved, const ConcurrentWork& concurrent) const;
  void save_h(Step& step, int64_t num_rows, const Tensor& offsets_e1, Saved& saved) const;
  void hold_tokens(Step& step, const Dispatched& tokens, Saved& saved) const;  // for backward_weight
  // Sends the rows of dy to the experts, with the weight of each row.
  Dispatched receive_grads(Step& step, Tensor dy_TD, Saved& saved) const;
  // The same with batch_split. It runs backward_down() of all parts but the last one, which overlaps with the exchange,
  // and `concurrent`.
  Dispatched receive_grads_in_parts(Step& step, Tensor dweight_R, const SplitDispatcher::Parts& parts, Saved& saved,
                                    const ConcurrentWork& concurrent) const;
  Dispatched hold_grads(Step& step, const Dispatched& grads, Saved& saved) const;  // for backward_weight
  // With batch_split: sends the rows of x again, and recomputes h of each part while the next one is sent.
  Dispatched recompute_h_in_parts(Step& step, const SplitDispatcher::Parts& parts, Saved& saved) const;
  // backward_down computes the derivatives w.r.t. h from dy, and backward_up computes those w.r.t. x from these.
  void backward_down(Step& step, Tensor dweight_R, const Dispatched& grads, Saved& saved,
                     const RowPart& part = {}) const;
  // The same, but also quantises its results. The rows of dx are scratch until backward_up.
  void backward_down_quantised(Step& step, Tensor dweight_R, Tensor weight_R, Tensor dx_RD, Saved& saved) const;
  void backward_up(Step& step, Tensor dx_RD, Saved& saved) const;
  // Adds the derivative through the adapter of W2, unless d_expert_down has added it (is_added).
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
  // Draws of stochastic rounding need the index of a row's token: ranks share experts or a micro-batch, or the experts
  // compute it in chunks.
  bool rounds_by_token_ = false;
  bool mixes_tokens_ = false;  // rows of experts come from several ranks
  TokensOfRows tokens_of_rows_;
  GatedActivation activation_;
  bool emits_quantised_ = false;  // d_expert_down quantises what it computes
  bool counts_ = false;           // log.precision: dh is quantised once more, where it is counted, to the same bits
  bool saves_in_8_bits_ = false;  // h is saved in 8 bits
  const ExpertRows* rows_;        // null: without a budget
  std::unique_ptr<Dispatcher> dispatcher_;
  const SplitDispatcher* split_ = nullptr;  // dispatcher_, with batch_split
  WireRows wire_;
};

}  // namespace moebius
