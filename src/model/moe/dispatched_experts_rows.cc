// The rows of DispatchedExperts: their groups and their tokens, for quantisation and dropout, and their memory. The
// file also has the forward pass of one token, whose rows are not sorted.
#include "model/moe/dispatched_experts.h"

#include "model/moe/block_operands.h"
#include "ops/one_token/one_token.h"

namespace moebius {

void DispatchedExperts::find_tokens(Step& step, int64_t T, Saved& saved) const {
  const bool for_dropout = has_dropout_ && step.batch.training;
  if (!for_dropout && !finds_batches(step)) return;
  StackScope scope(step.stack);
  const Tensor all_N = saved.token_index_N.rows(0, dispatcher_->source_rows(T));
  dispatcher_->dispatch_index(step, all_N, tokens_of_rows_.index_of_own(step, T), *saved.handle);
}

bool DispatchedExperts::finds_batches(const Step& step) const {
  return rounds_by_token_ && !step.batch.scalars_memory.empty();
}

RowGroups DispatchedExperts::in_place(Step& step, const Rows& rows, const Saved& saved, const Tensor& own_TD) const {
  RowGroups groups{.offsets_e1 = rows.token_R.empty() ? rows.offsets_e1 : Tensor{},
                   .token_R = {},
                   .measured = own_TD,
                   .counts_measured = counts_ && mixes_tokens_};
  if (finds_batches(step)) groups.index_N = saved.token_index_N;
  if (!groups.counts_measured) return groups;
  if (finds_batches(step)) groups.measured_index_T = tokens_of_rows_.index_of_own(step, own_TD.dim(0));
  if (wire_.is_packed()) groups.measured = wire_.unpack(step, wire_.pack(step, own_TD));  // experts read them as sent
  return groups;
}

RowGroups DispatchedExperts::by_expert(const Step& step, const Rows& rows, const Saved& saved) const {
  RowGroups groups{.offsets_e1 = rows.offsets_e1, .token_R = {}, .source_R = rows.token_R};
  if (finds_batches(step)) {
    groups.index_N = saved.token_index_N;
    groups.is_mixed = mixes_tokens_;
  }
  return groups;
}

RowGroups DispatchedExperts::gathered(const Step& step, const Rows& rows, const Saved& saved) const {
  RowGroups groups = by_expert(step, rows, saved);
  groups.token_R = rows.token_R;
  return groups;
}

Adapter::Tokens DispatchedExperts::tokens(Step& step, const Rows& rows, const Saved& saved) const {
  if (!has_dropout_ || !step.batch.training) return {};
  return {.index_N = saved.token_index_N, .row_R = rows.token_R};
}

void DispatchedExperts::open_h(Step& step, Saved& saved) const {
  rows_ ? saved.h_R2F.open_in(rows_->scratch().h) : saved.h_R2F.open(step.stack);
  if (!rows_) return saved.w1_low.open(step.stack);
  if (!w1_adapter_.is_empty()) saved.w1_low.open_in(rows_->scratch().low);
}

void DispatchedExperts::open_gradients(Step& step, Saved& saved) const {
  const auto open = [&](WgradInput& tensor, const Tensor& buffer) {
    rows_ ? tensor.open_in(buffer) : tensor.open(step.stack);
  };
  if (saved.has_columns) {
    const int64_t rows = padded_rows(saved.dh_R2F.dim(0), w1_.spec.shape[0]);
    saved.dh_columns = alloc_blocks(step, {2 * F_, rows}, ScaleLayout::row_blocks, /*transposed=*/true);
    saved.sa_columns = alloc_blocks(step, {F_, rows}, ScaleLayout::square_blocks, /*transposed=*/true);
    return;
  }
  const ExpertRows::Scratch scratch = rows_ ? rows_->scratch() : ExpertRows::Scratch{};
  open(saved.dh_R2F, scratch.dh);
  open(saved.sa_RF, scratch.act);
  if (!w1_adapter_.is_empty()) open(saved.w1_dlow, scratch.dlow1);
  if (!w2_adapter_.is_empty()) open(saved.w2_dlow, scratch.dlow2);
}

Tensor DispatchedExperts::activations(Step& step, int64_t R) const {
  return rows_ ? rows_->scratch().act.rows(0, R) : step.alloc({R, F_}, dtype_);
}

Tensor DispatchedExperts::outputs(Step& step, int64_t R) const {
  return rows_ ? rows_->scratch().y.rows(0, R) : step.alloc({R, D_}, dtype_);
}

// Only for a rank that has all experts, so no rows are sent.
bool DispatchedExperts::forward_token(Step& step, Tensor y_1D, Tensor x_1D, const RouteFwd& choose,
                                      RoutedExperts::Saved& base) const {
  const bool is_plain = w1_precision_.is_plain() && w2_precision_.is_plain() && w1_adapter_.is_empty() &&
                        w2_adapter_.is_empty() && !counts_;
  if (!is_inference_ || !is_plain || mixes_tokens_ || rows_ || split_) return false;
  StackScope scope(step.stack);
  const TokenExperts op{.y_1D = y_1D,
                        .topk_1K = choose.route.topk_TK,
                        .weight_1K = choose.route.weight_TK,
                        .a_KF = step.alloc({choose.route.topk_TK.dim(1), F_}, dtype_),
                        .logits_1E = choose.logits_TE,
                        .bias_E = choose.bias_E,
                        .x_1D = x_1D,
                        .w1_e2FD = w1_operands_.w(step).data,
                        .w2_eDF = w2_operands_.w(step).data,
                        .b1_e2F = b1_ ? b1_->w : Tensor{},
                        .b2_eD = b2_ ? b2_->w : Tensor{},
                        .rule = choose.rule,
                        .activation = activation_};
  if (!takes(step.stream, op)) return false;
  own(base).x_TD = x_1D;
  token_experts(step.stream, op);
  return true;
}

}  // namespace moebius
