#include "model/moe/dispatchers/dispatcher_local.h"

#include "ops/elementwise/elementwise.h"
#include "ops/permute/permute.h"

namespace moebius {

Dispatched LocalDispatcher::dispatch(Step&, Tensor x_TD, DispatchHandle& handle) const {
  const Route& route = handle.route;
  return {.source = x_TD, .rows = {.offsets_e1 = route.offsets_E1, .token_R = route.row_token_R}, .weight_R = {}};
}

void LocalDispatcher::dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle&) const {
  copy(step.stream, all_N, index_T);
}

void LocalDispatcher::combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const {
  const Route& route = handle.route;
  moebius::combine(step.stream,
                   {.out_TD = y_TD, .y_RD = y_RD, .pair_row_TK = route.pair_row_TK, .weight_TK = route.weight_TK});
}

Dispatched LocalDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  const Route& route = handle.route;
  Dispatched grads = dispatch(step, dy_TD, handle);
  grads.weight_R = step.alloc({route.row_pair_R.dim(0)}, DType::f32);
  pairs_to_rows(step.stream, {.to_R = grads.weight_R,
                              .from_TK = route.weight_TK,
                              .row_pair_R = route.row_pair_R,
                              .offsets_E1 = route.offsets_E1});
  return grads;
}

void LocalDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                   DispatchHandle& handle) const {
  const Tensor& pair_row_TK = handle.route.pair_row_TK;
  moebius::combine(step.stream, {.out_TD = dx_TD, .y_RD = dx_RD, .pair_row_TK = pair_row_TK});
  rows_to_pairs(step.stream, {.to_TK = dweight_TK, .from_R = dweight_R, .pair_row_TK = pair_row_TK});
}

}  // namespace moebius
