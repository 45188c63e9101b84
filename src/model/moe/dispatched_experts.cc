#include "model/moe/dispatched_experts.h"

#include "model/moe/routed_experts_params.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

GatedActivation activation_of(const ModelSpec& m) {
  if (m.swiglu_limit == 0) return {};
  return {.alpha = 1.702f, .limit = static_cast<float>(m.swiglu_limit), .shift = 1.0f};
}

// The degrees are checked before anything is declared.
const LayerContext& checked(const LayerContext& c) {
  check_expert_degrees(c.model, c.mesh.shape());
  return c;
}

// The experts of this rank among all.
ExpertRange experts_here(const LayerContext& c) {
  return {.first = c.mesh.place().ep * (c.model.num_experts / c.mesh.shape().ep), .all = c.model.num_experts};
}

// Rows sorted by expert, as an operand that is read in place, and as one that is transposed. Rows that
// are read by token are all there; others are as many as the last offset says.
RowGroups in_place(const Rows& rows) { return rows.token_R.empty() ? RowGroups{rows.offsets_e1, {}} : RowGroups{}; }
RowGroups by_expert(const Rows& rows) { return {rows.offsets_e1, {}}; }
RowGroups gathered(const Rows& rows) { return {rows.offsets_e1, rows.token_R}; }

// Runs an expert op with scratch from the step stack for the duration of the call.
template <class Op, class Run>
void run_expert_op(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

}  // namespace

DispatchedExperts::DispatchedExperts(const LayerContext& c, const std::string& prefix)
    : D_(c.model.hidden_size),
      F_(c.model.moe_intermediate_size / c.mesh.shape().etp),
      max_tokens_(c.stream_rows()),
      dtype_(c.dtype),
      generates_(c.params.use() == ModelUse::inference),
      w1_(c.params.declare(stored_first(w1_spec(checked(c), prefix)))),
      w2_(c.params.declare(stored_first(w2_spec(c, prefix)))),
      w1_precision_(precision_of(c, w1_.spec, experts_here(c))),
      w2_precision_(precision_of(c, w2_.spec, experts_here(c))),
      w1_operands_(c, w1_, w1_precision_),
      w2_operands_(c, w2_, w2_precision_),
      w1_adapter_(c, w1_.spec),
      w2_adapter_(c, w2_.spec),
      activation_(activation_of(c.model)),
      dispatcher_(make_dispatcher(c.dispatcher, {.num_experts = c.model.num_experts,
                                                 .top_k = c.model.top_k,
                                                 .max_tokens = max_tokens_,
                                                 .mesh = &c.mesh,
                                                 .rows_factor = c.balance.rank_rows_factor,
                                                 .window = c.window,
                                                 .layer = prefix})) {
  if (!c.model.expert_proj_bias) return;
  b1_ = &c.params.declare(b1_spec(c, prefix));
  b2_ = &c.params.declare(b2_spec(c, prefix));
  b2_first_ = first_b2_column(c);
}

std::unique_ptr<RoutedExperts::Saved> DispatchedExperts::declare_saved(MemoryPlan& plan,
                                                                       const std::string& prefix) const {
  auto own = std::make_unique<Saved>();
  Saved& saved = *own;
  saved.delivery = dispatcher_->declare_saved(plan, prefix + ".delivery");
  const int64_t R = dispatcher_->max_rows(max_tokens_), N = dispatcher_->source_rows(max_tokens_);
  saved.h_R2F.declare(plan, prefix + ".h", {R, 2 * F_}, dtype_, &RecomputeSpec::expert_up);
  saved.dh_R2F.declare(plan, prefix + ".dh", {R, 2 * F_}, dtype_);
  saved.sa_RF.declare(plan, prefix + ".sa", {R, F_}, dtype_);
  saved.tokens.declare(plan, prefix + ".tokens", {N, D_}, dtype_);
  saved.grads.declare(plan, prefix + ".grads", {N, D_}, dtype_);
  if (b2_) saved.weight_R.declare(plan, prefix + ".row_weight", {R}, DType::f32);
  if (!w1_adapter_.is_empty()) {
    const Shape low{R, w1_adapter_.low_columns()};
    saved.w1_low.declare(plan, prefix + ".w1_low", low, dtype_, &RecomputeSpec::expert_up);
    saved.w1_low_of_dw.declare(plan, prefix + ".w1_low_of_dw", low, dtype_);
    saved.w1_dlow.declare(plan, prefix + ".w1_dlow", low, dtype_);
  }
  if (!w2_adapter_.is_empty()) saved.w2_dlow.declare(plan, prefix + ".w2_dlow", {R, w2_adapter_.low_columns()}, dtype_);
  return own;
}

void DispatchedExperts::forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route,
                                RoutedExperts::Saved& base) const {
  Saved& saved = own(base);
  saved.x_TD = x_TD;
  dispatcher_->announce(step, route, *saved.delivery);
  StackScope scope(step.stack);
  const int64_t R = dispatcher_->max_rows(y_TD.dim(0));
  const Dispatched in = dispatcher_->dispatch(step, x_TD, *saved.delivery);
  saved.h_R2F.open(step.stack);
  saved.w1_low.open(step.stack);
  const Tensor a_RF = step.alloc({R, F_}, dtype_), y_RD = step.alloc({R, D_}, dtype_);
  const Operand quantised_a = up_quantises() ? w2_precision_.x_rows(step.stack, a_RF.shape) : Operand{};
  up(step, a_RF, quantised_a, in, saved);
  const QuantizeContext c = quantize_context(step);
  run_expert_op(step,
                ExpertDown{.y_RD = y_RD,
                           .a_RF = up_quantises() ? quantised_a : w2_precision_.x(c, a_RF, by_expert(in.rows)),
                           .w2_eDF = w2_operands_.w(step),
                           .b2_eC = b2_ ? b2_->w : Tensor{},
                           .b2_first = b2_first_,
                           .rows = {.offsets_e1 = in.rows.offsets_e1},
                           .few_rows = generates_ && in.source.dim(0) <= kFewRows},
                expert_down);
  w2_adapter_.forward(step, y_RD, a_RF, {.offsets_e1 = in.rows.offsets_e1});
  dispatcher_->combine(step, y_TD, y_RD, *saved.delivery);
}

void DispatchedExperts::recompute(Step&, Tensor x_TD, RoutedExperts::Saved& saved) const { own(saved).x_TD = x_TD; }

bool DispatchedExperts::up_quantises() const {
  return !w1_precision_.is_plain() && w2_precision_.has_row_blocks() && w1_adapter_.is_empty() &&
         w2_adapter_.is_empty();
}

bool DispatchedExperts::d_down_quantises() const {
  return !w2_precision_.is_plain() && w1_precision_.has_row_blocks() && w2_adapter_.is_empty();
}

void DispatchedExperts::up(Step& step, Tensor a_RF, const Operand& quantised_a, const Dispatched& in,
                           const Saved& saved) const {
  StackScope scope(step.stack);
  const QuantizeContext c = quantize_context(step);
  run_expert_op(step,
                ExpertUp{.h_R2F = saved.h_R2F.rows(0, a_RF.dim(0)),
                         .a_RF = a_RF,
                         .quantised_a = quantised_a,
                         .x_TD = w1_precision_.x(c, in.source, in_place(in.rows)),
                         .w1_e2FD = w1_operands_.w(step),
                         .b1_e2F = b1_ ? b1_->w : Tensor{},
                         .rows = in.rows,
                         .activation = activation_,
                         .few_rows = generates_ && in.source.dim(0) <= kFewRows},
                expert_up);
  if (w1_adapter_.is_empty()) return;
  const Tensor h_R2F = saved.h_R2F.rows(0, a_RF.dim(0));
  w1_adapter_.forward(step, h_R2F, in.source, in.rows, 0, saved.w1_low.rows(0, a_RF.dim(0)));
  low_rank_activation(step.stream,
                      {.a_RF = a_RF, .h_R2F = h_R2F, .offsets_e1 = in.rows.offsets_e1, .activation = activation_});
}

void DispatchedExperts::backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                                       RoutedExperts::Saved& base) const {
  Saved& saved = own(base);
  saved.dh_R2F.open(step.stack);
  saved.sa_RF.open(step.stack);
  if (!w1_adapter_.is_empty()) saved.w1_dlow.open(step.stack);
  if (!w2_adapter_.is_empty()) saved.w2_dlow.open(step.stack);
  const Tensor weight_R = receive(step, dy_TD, saved);
  const int64_t R = saved.dh_R2F.dim(0);
  StackScope scope(step.stack);
  const Tensor dweight_R = step.alloc({R}, DType::f32), dx_RD = step.alloc({R, D_}, dtype_);
  backward_rows(step, dx_RD, dweight_R, weight_R, saved);
  dispatcher_->dispatch_bwd(step, dx_TD, dweight_TK, dx_RD, dweight_R, *saved.delivery);
}

Tensor DispatchedExperts::receive(Step& step, Tensor dy_TD, Saved& saved) const {
  const Dispatched tokens = dispatcher_->dispatch(step, saved.x_TD, *saved.delivery);
  saved.token_rows = tokens.rows;
  saved.tokens.hold(step.stream, tokens.source);
  saved.w1_low.open(step.stack);
  saved.h_R2F.recompute(step.stack, [&] {
    StackScope scope(step.stack);
    up(step, step.alloc(saved.sa_RF.shape, dtype_), {}, tokens, saved);
  });
  if (!w1_adapter_.is_empty()) saved.w1_low_of_dw.hold(step.stream, saved.w1_low);
  const Dispatched grads = dispatcher_->combine_bwd(step, dy_TD, *saved.delivery);
  saved.grad_rows = grads.rows;
  saved.grads.hold(step.stream, grads.source);
  if (b2_) saved.weight_R.hold(step.stream, grads.weight_R);
  return grads.weight_R;
}

void DispatchedExperts::backward_rows(Step& step, Tensor dx_RD, Tensor dweight_R, Tensor weight_R, Saved& saved) const {
  const QuantizeContext c = quantize_context(step);
  StackScope whole(step.stack);
  const Operand quantised_dh = d_down_quantises() ? w1_precision_.dy_rows(step.stack, saved.dh_R2F.shape) : Operand{};
  {
    StackScope scope(step.stack);
    run_expert_op(step,
                  DExpertDown{.dh_R2F = saved.dh_R2F,
                              .sa_RF = saved.sa_RF,
                              .dweight_R = dweight_R,
                              .quantised_dh = quantised_dh,
                              .dout_TD = w2_precision_.dy(c, saved.grads, in_place(saved.grad_rows)),
                              .w2_eDF = w2_operands_.w_for_dx(step),
                              .b2_eC = b2_ ? b2_->w : Tensor{},
                              .h_R2F = saved.h_R2F,
                              .weight_R = weight_R,
                              .b2_first = b2_first_,
                              .rows = saved.grad_rows,
                              .activation = activation_},
                  d_expert_down);
  }
  if (!w2_adapter_.is_empty()) adapted_down_bwd(step, dweight_R, weight_R, saved);
  StackScope scope(step.stack);
  run_expert_op(step,
                DExpertUp{.dx_RD = dx_RD,
                          .dh_R2F = d_down_quantises() ? quantised_dh
                                                       : w1_precision_.dy(c, saved.dh_R2F, by_expert(saved.grad_rows)),
                          .w1_e2FD = w1_operands_.w_for_dx(step),
                          .rows = {.offsets_e1 = saved.grad_rows.offsets_e1}},
                d_expert_up);
  w1_adapter_.backward_input(
      step,
      {.dx = dx_RD, .dy = saved.dh_R2F, .rows = {.offsets_e1 = saved.grad_rows.offsets_e1}, .dlow = saved.w1_dlow});
}

void DispatchedExperts::adapted_down_bwd(Step& step, Tensor dweight_R, Tensor weight_R, const Saved& saved) const {
  StackScope scope(step.stack);
  const Tensor g_RF = step.alloc(saved.sa_RF.shape, dtype_);
  w2_adapter_.backward_input(
      step, {.dx = g_RF, .dy = saved.grads, .rows = saved.grad_rows, .accumulate = false, .dlow = saved.w2_dlow});
  d_low_rank_activation(step.stream, {.dh_R2F = saved.dh_R2F,
                                      .dweight_R = dweight_R,
                                      .g_RF = g_RF,
                                      .h_R2F = saved.h_R2F,
                                      .weight_R = weight_R,
                                      .offsets_e1 = saved.grad_rows.offsets_e1,
                                      .activation = activation_});
}

void DispatchedExperts::backward_weight(Step& step, const RoutedExperts::Saved& base) const {
  const Saved& saved = own(base);
  w2_adapter_.backward_weight(
      step, {.dy = saved.grads, .x = saved.sa_RF, .rows = saved.grad_rows, .gather_dy = true, .dlow = saved.w2_dlow});
  w1_adapter_.backward_weight(step, {.dy = saved.dh_R2F,
                                     .x = saved.tokens,
                                     .rows = saved.token_rows,
                                     .gather_x = true,
                                     .low = saved.w1_low_of_dw,
                                     .dlow = saved.w1_dlow});
  const QuantizeContext c = quantize_context(step);
  if (w2_.has_grad) {
    StackScope scope(step.stack);
    run_expert_op(step,
                  ExpertWgrad{.dw_eMN = w2_.dw,
                              .left_RM = w2_precision_.dy_for_dw(c, saved.grads, gathered(saved.grad_rows)),
                              .right_RN = w2_precision_.x_for_dw(c, saved.sa_RF, by_expert(saved.grad_rows)),
                              .gather_left = true,
                              .accumulate = !step.batch.first_of_step,
                              .rows = saved.grad_rows},
                  expert_wgrad);
  }
  if (w1_.has_grad) {
    StackScope scope(step.stack);
    run_expert_op(step,
                  ExpertWgrad{.dw_eMN = w1_.dw,
                              .left_RM = w1_precision_.dy_for_dw(c, saved.dh_R2F, by_expert(saved.token_rows)),
                              .right_RN = w1_precision_.x_for_dw(c, saved.tokens, gathered(saved.token_rows)),
                              .gather_right = true,
                              .accumulate = !step.batch.first_of_step,
                              .rows = saved.token_rows},
                  expert_wgrad);
  }
  bias_gradients(step, saved);
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
