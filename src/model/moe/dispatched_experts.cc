#include "model/moe/dispatched_experts.h"

#include "config/check/batch_split_check.h"
#include "config/dispatcher_choice.h"
#include "model/moe/block_operands.h"
#include "model/moe/dispatched_experts_ops.h"
#include "model/moe/routed_experts_params.h"
#include "ops/experts/d_expert_down_quantised.h"
#include "ops/experts/few_rows.h"
#include "ops/gemm/gemm.h"

namespace moebius {
namespace {

GatedActivation activation_of(const ModelSpec& m) {
  if (m.swiglu_limit == 0) return {};
  return {.alpha = 1.702f, .limit = static_cast<float>(m.swiglu_limit), .shift = 1.0f};
}

bool sends_all(const LayerContext& c) {
  return c.params.use() == ModelUse::training && sends_all_tokens(c.model.num_experts, c.model.top_k, c.mesh.shape().ep,
                                                                  c.model.n_group, c.balance.force_balance);
}

// Checks the degrees of parallelism before anything is declared.
const LayerContext& checked(const LayerContext& c) {
  check_expert_degrees(c.model, c.mesh.shape());
  return c;
}

// Returns the experts of this rank among all.
ExpertRange experts_here(const LayerContext& c) {
  return {.first = c.mesh.place().ep * (c.model.num_experts / c.mesh.shape().ep), .all = c.model.num_experts};
}

// Returns the dispatcher as one that moves rows in parts, for parallel.expert_overlap = "batch_split".
const SplitDispatcher* splitting(const Dispatcher& dispatcher, bool are_plain) {
  check_split_rows(are_plain);
  check_split_dispatcher(dispatcher.split() != nullptr);
  return dispatcher.split();
}

// Returns the adapter's term where the kernel of `op` adds it to its own sums, else an empty term. The term has memory
// in both cases, so that the plan does not depend on the kernel.
template <class Op>
LowRankTerm if_added(const Step& step, Op op, const LowRankTerm& term) {
  op.added = term;
  return !term.empty() && adds_term(step.stream, op) ? term : LowRankTerm{};
}

}  // namespace

DispatchedExperts::DispatchedExperts(const LayerContext& c, const std::string& prefix, int64_t max_tokens)
    : D_(c.model.hidden_size),
      F_(c.model.moe_intermediate_size / c.mesh.shape().etp),
      max_tokens_(max_tokens),
      dtype_(c.dtype),
      is_inference_(c.params.use() == ModelUse::inference),
      overlaps_(c.expert_overlap != ExpertOverlap::none && c.mesh.shape().ep * c.mesh.shape().etp > 1),
      w1_(declare_expert_weights(c, w1_spec(checked(c), prefix), max_tokens)),
      w2_(declare_expert_weights(c, w2_spec(c, prefix), max_tokens)),
      w1_precision_(precision_of(c, w1_.spec, experts_here(c))),
      w2_precision_(precision_of(c, w2_.spec, experts_here(c))),
      w1_operands_(c, w1_, w1_precision_),
      w2_operands_(c, w2_, w2_precision_),
      w1_adapter_(c.lora.is_on() ? Adapter(c, w1_spec(c, prefix)) : Adapter()),
      w2_adapter_(c.lora.is_on() ? Adapter(c, w2_spec(c, prefix)) : Adapter()),
      has_dropout_(c.lora.dropout > 0 && !(w1_adapter_.is_empty() && w2_adapter_.is_empty())),
      tokens_of_rows_(c),
      activation_(activation_of(c.model)),
      rows_(c.expert_rows),
      dispatcher_(make_dispatcher(c.dispatcher, {.num_experts = c.model.num_experts,
                                                 .top_k = c.model.top_k,
                                                 .max_tokens = max_tokens_,
                                                 .mesh = &c.mesh,
                                                 .rows_factor = c.balance.rank_rows_factor,
                                                 .window = c.window,
                                                 .rows = c.expert_rows,
                                                 .round_robin = c.balance.force_balance,
                                                 .sends_all = sends_all(c),
                                                 .layer = prefix})),
      wire_(c.precision, dtype_, D_) {
  emits_quantised_ = c.precision.recipe == PrecisionRecipe::fp8_block && !w1_precision_.is_plain() &&
                     !w2_precision_.is_plain() && w1_adapter_.is_empty() && w2_adapter_.is_empty() &&
                     !c.model.expert_proj_bias && activation_ == GatedActivation{};
  const MeshShape& mesh = c.mesh.shape();
  rounds_by_token_ = (w1_precision_.rounds_rows() || w2_precision_.rounds_rows()) &&
                     (mesh.tp * mesh.cp * mesh.ep * mesh.etp > 1 || max_tokens_ < c.stream_rows());
  mixes_tokens_ = mesh.ep * mesh.etp > 1;
  counts_ = c.quantize_stats != nullptr;
  saves_in_8_bits_ = saves_in_8_bits(c, !w1_precision_.is_plain() && !w2_precision_.is_plain());
  if (overlaps_ && !is_inference_ && c.expert_overlap == ExpertOverlap::batch_split) {
    const bool is_plain = w1_precision_.is_plain() && w2_precision_.is_plain() && !wire_.is_packed();
    split_ = splitting(*dispatcher_, is_plain && w1_adapter_.is_empty() && w2_adapter_.is_empty());
  }
  if (c.expert_rows) c.expert_rows->add_layer(w1_adapter_.low_columns(), w2_adapter_.low_columns(), saves_in_8_bits_);
  if (!c.model.expert_proj_bias) return;
  b1_ = &c.params.declare(b1_spec(c, prefix));
  b2_ = &c.params.declare(b2_spec(c, prefix));
  b2_first_ = first_b2_column(c);
}

std::unique_ptr<RoutedExperts::Saved> DispatchedExperts::declare_saved(MemoryPlan& plan,
                                                                       const std::string& prefix) const {
  auto own = std::make_unique<Saved>();
  Saved& saved = *own;
  saved.handle = dispatcher_->declare_saved(plan, prefix + ".handle");
  const int64_t R = dispatcher_->max_rows(max_tokens_), N = dispatcher_->source_rows(max_tokens_);
  if (rows_) {
    saved.h_R2F.declare_in_place({R, 2 * F_}, dtype_);
    rows_->declare_saved(plan, prefix, saved.held, saves_in_8_bits_);
  } else {
    saved.h_R2F.declare(plan, prefix + ".h", {R, 2 * F_}, dtype_, &RecomputeSpec::expert_up, saves_in_8_bits_);
  }
  saved.dh_R2F.declare(plan, prefix + ".dh", {R, 2 * F_}, dtype_);
  saved.sa_RF.declare(plan, prefix + ".sa", {R, F_}, dtype_);
  saved.has_columns = emits_quantised_ && !counts_ && !rows_ && !plan.splits_backward() &&
                      !w1_precision_.has_plain_dw() && w1_.has_grad && w2_.has_grad;
  saved.tokens.declare(plan, prefix + ".tokens", {N, D_}, dtype_);
  saved.grads.declare(plan, prefix + ".grads", {N, D_}, dtype_);
  if (b2_) saved.weight_R.declare(plan, prefix + ".row_weight", {R}, DType::f32);
  if (!w1_adapter_.is_empty()) {
    const Shape low{R, w1_adapter_.low_columns()};
    if (rows_)
      saved.w1_low.declare_in_place(low, dtype_);
    else
      saved.w1_low.declare(plan, prefix + ".w1_low", low, dtype_, &RecomputeSpec::expert_up);
    saved.w1_low_of_dw.declare(plan, prefix + ".w1_low_of_dw", low, dtype_);
    saved.w1_dlow.declare(plan, prefix + ".w1_dlow", low, dtype_);
  }
  if (!w2_adapter_.is_empty()) saved.w2_dlow.declare(plan, prefix + ".w2_dlow", {R, w2_adapter_.low_columns()}, dtype_);
  if (has_dropout_ || rounds_by_token_)
    plan.declare(saved.token_index_N, prefix + ".token_index", {N}, DType::i32, Life::saved);
  return own;
}

void DispatchedExperts::forward(Step& step, Tensor y_TD, Tensor x_TD, const Route& route, RoutedExperts::Saved& base,
                                const ConcurrentWork& concurrent) const {
  Saved& saved = own(base);
  saved.x_TD = x_TD;
  dispatcher_->announce(step, route, *saved.handle);
  if (split_) return forward_in_parts(step, y_TD, x_TD, saved, concurrent);
  StackScope scope(step.stack);
  const int64_t R = dispatcher_->max_rows(y_TD.dim(0));
  Dispatched in;
  const int multiprocessors = sending_multiprocessors(step, saved);
  SideWork sending(
      step, overlaps_ && concurrent, [&] { in = dispatch(step, x_TD, saved); }, multiprocessors);
  if (concurrent) concurrent();
  sending.join();
  find_tokens(step, x_TD.dim(0), saved);
  open_h(step, saved);
  const Tensor a_RF = activations(step, R), y_RD = outputs(step, R);
  up(step, a_RF, in, saved);
  save_h(step, R, in.rows.offsets_e1, saved);
  down(step, y_RD, a_RF, in, saved);
  dispatcher_->combine(step, y_TD, y_RD, *saved.handle);
}

void DispatchedExperts::save_h(Step& step, int64_t num_rows, const Tensor& offsets_e1, Saved& saved) const {
  if (rows_ && step.batch.training) rows_->stash(step, saved.held, offsets_e1);
  if (!rows_) saved.h_R2F.save(step, num_rows, offsets_e1);
}

void DispatchedExperts::down(Step& step, Tensor y_RD, Tensor a_RF, const Dispatched& in, const Saved& saved,
                             const RowPart& part) const {
  StackScope scope(step.stack);
  const Rows rows{.offsets_e1 = in.rows.offsets_e1};
  ExpertDown op{.y_RD = y_RD,
                .a_RF = w2_precision_.x(quantize_context(step), a_RF, by_expert(step, in.rows, saved)),
                .w2_eDF = w2_operands_.w(step),
                .b2_eC = b2_ ? b2_->w : Tensor{},
                .b2_first = b2_first_,
                .rows = rows,
                .few_rows = is_inference_ && saved.x_TD.dim(0) <= kFewRows,
                .part = part};
  if (w2_adapter_.is_empty()) {  // operands that are made here are written after expert_up was called
    return run_expert_op(step, op, w2_precision_.is_plain() ? expert_down_after_up : expert_down);
  }
  const Adapter::Forward adapted{.y = y_RD,
                                 .x = a_RF,
                                 .rows = rows,
                                 .low = step.alloc({y_RD.dim(0), w2_adapter_.low_columns()}, dtype_),
                                 .tokens = tokens(step, in.rows, saved)};
  op.added = if_added(step, op, w2_adapter_.forward_term(step, adapted.low));
  if (!op.added.empty()) w2_adapter_.compute(step, op.added, adapted);
  run_expert_op(step, op, expert_down);
  if (op.added.empty()) w2_adapter_.forward(step, adapted);
}

void DispatchedExperts::recompute(Step&, Tensor x_TD, RoutedExperts::Saved& saved) const { own(saved).x_TD = x_TD; }

void DispatchedExperts::up(Step& step, Tensor a_RF, const Dispatched& in, const Saved& saved,
                           const RowPart& part) const {
  StackScope scope(step.stack);
  const QuantizeContext c = quantize_context(step);
  const Tensor h_R2F = saved.h_R2F.rows(0, a_RF.dim(0));
  ExpertUp op{.h_R2F = h_R2F,
              .a_RF = a_RF,
              .x_TD = w1_precision_.x(c, in.source, in_place(step, in.rows, saved, saved.x_TD)),
              .w1_e2FD = w1_operands_.w(step),
              .b1_e2F = b1_ ? b1_->w : Tensor{},
              .rows = in.rows,
              .activation = activation_,
              .few_rows = is_inference_ && saved.x_TD.dim(0) <= kFewRows,
              .part = part};
  if (w1_adapter_.is_empty()) return run_expert_op(step, op, expert_up);
  const Adapter::Forward adapted{.y = h_R2F,
                                 .x = in.source,
                                 .rows = in.rows,
                                 .low = saved.w1_low.rows(0, a_RF.dim(0)),
                                 .tokens = tokens(step, in.rows, saved)};
  op.added = if_added(step, op, w1_adapter_.forward_term(step, adapted.low));
  if (!op.added.empty()) w1_adapter_.compute(step, op.added, adapted);
  run_expert_op(step, op, expert_up);
  if (!op.added.empty()) return;
  w1_adapter_.forward(step, adapted);
  low_rank_activation(step.stream,
                      {.a_RF = a_RF, .h_R2F = h_R2F, .offsets_e1 = in.rows.offsets_e1, .activation = activation_});
}

void DispatchedExperts::backward_input(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD,
                                       RoutedExperts::Saved& base) const {
  run_backward(step, {dx_TD, dweight_TK, dy_TD}, own(base), /*with_weights=*/false, nullptr);
}

void DispatchedExperts::backward(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dy_TD, RoutedExperts::Saved& base,
                                 const ConcurrentWork& concurrent) const {
  run_backward(step, {dx_TD, dweight_TK, dy_TD}, own(base), /*with_weights=*/overlaps_, concurrent);
  if (!overlaps_) backward_weight(step, base);
}

// Three exchanges overlap with other work. x is sent after dy, unless h is recomputed, rows have a budget, or W1 has an
// adapter. Exchange, and work that overlaps with it:
//   x    after dy: the products that need only dy and h. Before dy, with batch_split alone: h of the own rows, and then
//        of each part that has arrived; with a budget of rows, copies of the kept rows
//   dy   `concurrent`, and with batch_split the product of the own rows, and then of each part that has arrived
//   dx   the gradients of weights
void DispatchedExperts::run_backward(Step& step, const BackwardTensors& d, Saved& saved, bool with_weights,
                                     const ConcurrentWork& concurrent) const {
  const int64_t T = d.dy_TD.dim(0), R = saved.dh_R2F.dim(0);
  open_gradients(step, saved);
  saved.dy_TD = d.dy_TD;
  SplitDispatcher::Parts parts;
  if (split_) parts = split_->parts(step, T, *saved.handle);
  const bool x_later = overlaps_ && !rows_ && !saved.h_R2F.is_recomputed() && w1_adapter_.is_empty();
  const int multiprocessors = sending_multiprocessors(step, saved);
  Dispatched tokens;
  const auto dispatch_again = [&] { tokens = dispatch(step, saved.x_TD, saved); };
  if (!x_later && split_ && !rows_) {
    hold_tokens(step, recompute_h_in_parts(step, parts, saved), saved);
  } else if (!x_later) {
    SideWork coming(step, split_ != nullptr, dispatch_again, multiprocessors);
    unstash_h(step, tokens, saved, coming);
    coming.join();
    hold_tokens(step, tokens, saved);
  }
  Dispatched grads;
  Tensor dweight_R;
  if (split_) {
    dweight_R = step.alloc({R}, DType::f32);
    grads = receive_grads_in_parts(step, dweight_R, parts, saved, concurrent);
  } else {
    SideWork arriving(
        step, overlaps_ && concurrent, [&] { grads = receive_grads(step, d.dy_TD, saved); }, multiprocessors);
    if (concurrent) concurrent();
    arriving.join();
  }
  SideWork coming(
      step, x_later,
      [&] {
        if (x_later) dispatch_again();
      },
      multiprocessors);
  StackScope scope(step.stack);
  if (!split_) dweight_R = step.alloc({R}, DType::f32);
  const Tensor dx_RD = outputs(step, R);
  const bool reads_packed = emits_quantised_ && saved.h_R2F.in_8_bits();
  if (!split_)
    saved.h_bwd_R2F = reads_packed ? Tensor{} : saved.h_R2F.for_backward(step, R, saved.grad_rows.offsets_e1);
  if (emits_quantised_)
    backward_down_quantised(step, dweight_R, grads.weight_R, dx_RD, saved);
  else
    backward_down(step, dweight_R, grads, saved, split_ ? parts.others.back().rows : RowPart{});
  coming.use_whole_gpu();
  backward_up(step, dx_RD, saved);
  coming.join();
  if (x_later) hold_tokens(step, tokens, saved);
  SideWork going(step, overlaps_,
                 [&] { dispatcher_->dispatch_bwd(step, d.dx_TD, d.dweight_TK, dx_RD, dweight_R, *saved.handle); });
  if (with_weights) {
    down_gradient(step, saved);
    going.use_whole_gpu();
    up_gradient(step, saved);
    bias_gradients(step, saved);
  }
  going.join();
}

// Kernels pack rows, and copy those that a later pass needs, so these need multiprocessors whatever sends the rows.
int DispatchedExperts::sending_multiprocessors(const Step& step, const Saved& saved) const {
  const bool only_sends = !wire_.is_packed() && !saved.grads.is_kept();
  return only_sends ? dispatcher_->sending_multiprocessors(step) : SideWork::kMultiprocessors;
}

Dispatched DispatchedExperts::dispatch(Step& step, const Tensor& x_TD, Saved& saved) const {
  Dispatched in = dispatcher_->dispatch(step, wire_.pack(step, x_TD), *saved.handle);
  in.source = wire_.unpack(step, in.source);
  return in;
}

Dispatched DispatchedExperts::dispatch_grads(Step& step, const Tensor& dy_TD, Saved& saved) const {
  Dispatched in = dispatcher_->combine_bwd(step, wire_.pack(step, dy_TD), *saved.handle);
  in.source = wire_.unpack(step, in.source);
  return in;
}

void DispatchedExperts::hold_tokens(Step& step, const Dispatched& tokens, Saved& saved) const {
  saved.token_rows = tokens.rows;
  saved.tokens.hold(step.stream, tokens.source);
  if (!w1_adapter_.is_empty()) saved.w1_low_of_dw.hold(step.stream, saved.w1_low);
}

Dispatched DispatchedExperts::receive_grads(Step& step, Tensor dy_TD, Saved& saved) const {
  return hold_grads(step, dispatch_grads(step, dy_TD, saved), saved);
}

Dispatched DispatchedExperts::hold_grads(Step& step, const Dispatched& grads, Saved& saved) const {
  saved.grad_rows = grads.rows;
  saved.grads.hold(step.stream, grads.source);
  if (b2_) saved.weight_R.hold(step.stream, grads.weight_R);
  return {.source = saved.grads, .rows = grads.rows, .weight_R = grads.weight_R};
}

// Computing h also computes the activations, which are not used here.
void DispatchedExperts::unstash_h(Step& step, const Dispatched& tokens, Saved& saved, SideWork& coming) const {
  if (rows_) {
    open_h(step, saved);
    const auto compute = [&](Step& on, const Tensor& offsets_e1) {
      up(on, rows_->scratch().act, {.source = tokens.source, .rows = {offsets_e1, tokens.rows.token_R}}, saved);
    };
    return rows_->unstash(
        step, saved.held, tokens.rows.offsets_e1, [&] { coming.join(); }, compute);
  }
  saved.w1_low.open(step.stack);
  saved.h_R2F.recompute(step.stack, [&] {
    StackScope scope(step.stack);
    const Tensor a_RF = step.alloc(saved.sa_RF.shape, dtype_);
    coming.join();
    up(step, a_RF, tokens, saved);
  });
}

void DispatchedExperts::backward_down(Step& step, Tensor dweight_R, const Dispatched& grads, Saved& saved,
                                      const RowPart& part) const {
  const QuantizeContext c = quantize_context(step);
  LowRankTerm added;
  {
    StackScope scope(step.stack);
    DExpertDown op{.dh_R2F = saved.dh_R2F,
                   .sa_RF = saved.sa_RF,
                   .dweight_R = dweight_R,
                   .dout_TD = w2_precision_.dy(c, grads.source, in_place(step, grads.rows, saved, saved.dy_TD)),
                   .w2_eDF = w2_operands_.w_for_dx(step),
                   .b2_eC = b2_ ? b2_->w : Tensor{},
                   .h_R2F = saved.h_bwd_R2F,
                   .weight_R = grads.weight_R,
                   .b2_first = b2_first_,
                   .rows = grads.rows,
                   .activation = activation_,
                   .part = part};
    added = op.added = if_added(step, op, w2_adapter_.backward_term(step, saved.w2_dlow));
    if (!added.empty()) w2_adapter_.compute(step, added, down_input(step, {}, saved));
    run_expert_op(step, op, d_expert_down);
  }
  if (!w2_adapter_.is_empty()) adapted_down_bwd(step, dweight_R, grads.weight_R, saved, /*is_added=*/!added.empty());
}

void DispatchedExperts::backward_down_quantised(Step& step, Tensor dweight_R, Tensor weight_R, Tensor dx_RD,
                                                Saved& saved) const {
  const Shape of_dh = saved.dh_R2F.shape, of_g = saved.sa_RF.shape;
  saved.dh_rows = alloc_blocks(step, of_dh, ScaleLayout::row_blocks, /*transposed=*/false);
  StackScope scope(step.stack);
  // With a budget of rows sa has memory of its own, which is large enough for g; the memory of dx may be too small.
  const auto memory_of_g = [&]() -> Tensor {
    if (F_ <= D_) return first_elements(dx_RD, of_g);
    return rows_ ? saved.sa_RF : step.alloc(of_g, dtype_);
  };
  DExpertDownQuantised op{.dh_rows = saved.dh_rows,
                          .dweight_R = dweight_R,
                          .dout_TD = w2_precision_.dy(quantize_context(step), saved.grads,
                                                      in_place(step, saved.grad_rows, saved, saved.dy_TD)),
                          .w2_eDF = w2_operands_.w_for_dx(step),
                          .h_R2F = saved.h_bwd_R2F,
                          .weight_R = weight_R,
                          .rows = saved.grad_rows,
                          .g_RF = memory_of_g()};
  if (saved.h_R2F.in_8_bits())
    op.h_rows_RB = saved.h_R2F.packed_for_backward(step, of_dh[0], saved.grad_rows.offsets_e1);
  if (saved.has_columns) {
    op.dh_columns = saved.dh_columns;
    op.sa_columns = saved.sa_columns;
  } else {
    op.dh_R2F = saved.dh_R2F;
    op.sa_RF = saved.sa_RF;
  }
  run_expert_op(step, op, d_expert_down_quantised);
}

Adapter::Input DispatchedExperts::down_input(Step& step, Tensor g_RF, const Saved& saved) const {
  return {.dx = g_RF,
          .dy = saved.grads,
          .rows = saved.grad_rows,
          .accumulate = false,
          .dlow = saved.w2_dlow,
          .tokens = tokens(step, saved.grad_rows, saved)};
}

void DispatchedExperts::backward_up(Step& step, Tensor dx_RD, Saved& saved) const {
  const QuantizeContext c = quantize_context(step);
  StackScope scope(step.stack);
  const Rows rows{.offsets_e1 = saved.grad_rows.offsets_e1};
  const Adapter::Input adapted{.dx = dx_RD,
                               .dy = saved.dh_R2F,
                               .rows = rows,
                               .dlow = saved.w1_dlow,
                               .tokens = tokens(step, saved.grad_rows, saved)};
  DExpertUp op{.dx_RD = dx_RD,
               .dh_R2F = emits_quantised_ && !counts_
                             ? saved.dh_rows
                             : w1_precision_.dy(c, saved.dh_R2F, by_expert(step, saved.grad_rows, saved)),
               .w1_e2FD = w1_operands_.w_for_dx(step),
               .rows = rows};
  op.added = if_added(step, op, w1_adapter_.backward_term(step, saved.w1_dlow));
  if (!op.added.empty()) w1_adapter_.compute(step, op.added, adapted);
  run_expert_op(step, op, d_expert_up);
  if (op.added.empty()) w1_adapter_.backward_input(step, adapted);
}

void DispatchedExperts::adapted_down_bwd(Step& step, Tensor dweight_R, Tensor weight_R, const Saved& saved,
                                         bool is_added) const {
  StackScope scope(step.stack);
  const Tensor g_RF = rows_ ? rows_->scratch().g : step.alloc(saved.sa_RF.shape, dtype_);
  if (is_added) return;  // d_expert_down has all of g
  w2_adapter_.backward_input(step, down_input(step, g_RF, saved));
  d_low_rank_activation(step.stream, {.dh_R2F = saved.dh_R2F,
                                      .dweight_R = dweight_R,
                                      .g_RF = g_RF,
                                      .h_R2F = saved.h_bwd_R2F,
                                      .weight_R = weight_R,
                                      .offsets_e1 = saved.grad_rows.offsets_e1,
                                      .activation = activation_});
}

}  // namespace moebius
