// The gradients of the weights of DispatchedExperts: one product over all rows of an expert.
#include "model/moe/dispatched_experts_ops.h"

namespace moebius {

void DispatchedExperts::backward_weight(Step& step, const RoutedExperts::Saved& base) const {
  const Saved& saved = own(base);
  down_gradient(step, saved);
  up_gradient(step, saved);
  bias_gradients(step, saved);
}

void DispatchedExperts::down_gradient(Step& step, const Saved& saved) const {
  w2_adapter_.backward_weight(step, {.dy = saved.grads,
                                     .x = saved.sa_RF,
                                     .rows = saved.grad_rows,
                                     .gather_dy = true,
                                     .dlow = saved.w2_dlow,
                                     .tokens = tokens(step, saved.grad_rows, saved)});
  if (!w2_.has_grad) return;
  const QuantizeContext c = quantize_context(step);
  StackScope scope(step.stack);
  const RowGroups rows = gathered(step, saved.grad_rows, saved);
  const auto [left, right] =
      saved.has_columns
          ? std::pair(w2_precision_.dy_for_dw(c, saved.grads, rows), saved.sa_columns)
          : w2_precision_.for_dw(c, saved.grads, rows, saved.sa_RF, by_expert(step, saved.grad_rows, saved));
  run_expert_op(step,
                ExpertWgrad{.dw_eMN = w2_.product_grad(),
                            .left_RM = left,
                            .right_RN = right,
                            .gather_left = w2_precision_.has_plain_dw(),
                            .accumulate = w2_.adds_to_grad(step.batch),
                            .rows = saved.grad_rows},
                expert_wgrad);
}

void DispatchedExperts::up_gradient(Step& step, const Saved& saved) const {
  w1_adapter_.backward_weight(step, {.dy = saved.dh_R2F,
                                     .x = saved.tokens,
                                     .rows = saved.token_rows,
                                     .gather_x = true,
                                     .low = saved.w1_low_of_dw,
                                     .dlow = saved.w1_dlow,
                                     .tokens = tokens(step, saved.token_rows, saved)});
  if (!w1_.has_grad) return;
  const QuantizeContext c = quantize_context(step);
  StackScope scope(step.stack);
  const RowGroups rows = gathered(step, saved.token_rows, saved);
  const auto [left, right] =
      saved.has_columns
          ? std::pair(saved.dh_columns, w1_precision_.x_for_dw(c, saved.tokens, rows))
          : w1_precision_.for_dw(c, saved.dh_R2F, by_expert(step, saved.token_rows, saved), saved.tokens, rows);
  run_expert_op(step,
                ExpertWgrad{.dw_eMN = w1_.product_grad(),
                            .left_RM = left,
                            .right_RN = right,
                            .gather_right = w1_precision_.has_plain_dw(),
                            .accumulate = w1_.adds_to_grad(step.batch),
                            .rows = saved.token_rows},
                expert_wgrad);
}

void DispatchedExperts::bias_gradients(Step& step, const Saved& saved) const {
  if (b1_ && b1_->has_grad) {
    expert_bias_grad(step.stream,
                     {.db_eN = b1_->dw, .x_RM = saved.dh_R2F, .rows = {.offsets_e1 = saved.grad_rows.offsets_e1}});
  }
  if (b2_ && b2_->has_grad) {
    expert_bias_grad(step.stream, {.db_eN = b2_->dw,
                                   .x_RM = saved.grads,
                                   .weight_R = saved.weight_R,
                                   .x_first = b2_first_,
                                   .gather = true,
                                   .rows = saved.grad_rows});
  }
}

}  // namespace moebius
