// The rows of DispatchedExperts as groups for quantisation and dropout, with the tokens that they hold.
#include "model/moe/dispatched_experts.h"

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

}  // namespace moebius
