#include "model/moe/dispatchers/dispatcher_allgather.h"

#include "model/moe/expert_rows.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

AllGatherHandle& own(DispatchHandle& handle) { return dynamic_cast<AllGatherHandle&>(handle); }

}  // namespace

AllGatherDispatcher::AllGatherDispatcher(const DispatcherSpec& spec)
    : spec_(spec),
      ranks_(group_of_experts(*spec.mesh)),
      W_(ranks_.size()),
      e_(spec.num_experts / spec.mesh->shape().ep),
      first_expert_(e_ * spec.mesh->place().ep) {}

int64_t AllGatherDispatcher::max_rows(int64_t T) const {
  return max_expert_rows(spec_.mesh->shape(), spec_.num_experts, spec_.top_k, T, /*rows_factor=*/0);
}

std::unique_ptr<DispatchHandle> AllGatherDispatcher::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto handle = std::make_unique<AllGatherHandle>();
  AllGatherHandle& d = *handle;
  const int64_t N = W_ * spec_.max_tokens, K = spec_.top_k, R = max_rows(spec_.max_tokens);
  plan.declare(d.rows.offsets_e1, prefix + ".offsets", {e_ + 1}, DType::i32, Life::saved);
  plan.declare(d.rows.token_R, prefix + ".row_token", {R}, DType::i32, Life::saved);
  plan.declare(d.row_pair_R, prefix + ".row_pair", {R}, DType::i32, Life::saved);
  plan.declare(d.pair_row_NK, prefix + ".pair_row", {N, K}, DType::i32, Life::saved);
  plan.declare(d.weight_NK, prefix + ".weight", {N, K}, DType::f32, Life::saved);
  return handle;
}

// Returns the rows of x of all ranks, one rank after the other.
Tensor AllGatherDispatcher::gathered(Step& step, Tensor x) const {
  const Tensor all = step.alloc({W_ * x.dim(0), x.dim(1)}, x.dtype);
  ranks_.all_gather(step.stream, all, x);
  return all;
}

void AllGatherDispatcher::announce(Step& step, const Route& route, DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t N = W_ * route.topk_TK.dim(0);
  d.route = route;
  const Tensor pair_row_NK = d.pair_row_NK.rows(0, N);
  ranks_.all_gather(step.stream, pair_row_NK, route.pair_row_TK);
  ranks_.all_gather(step.stream, d.weight_NK.rows(0, N), route.weight_TK);
  index_rows(step.stream, {.offsets_e1 = d.rows.offsets_e1,
                           .row_token_R = d.rows.token_R,
                           .row_pair_R = d.row_pair_R,
                           .pair_row_TK = pair_row_NK,
                           .scratch = step.alloc_bytes(IndexRows::scratch_bytes(N, e_, step.stream)),
                           .topk_TK = gathered(step, route.topk_TK),
                           .kept_TK = pair_row_NK,
                           .first_expert = first_expert_});
}

Dispatched AllGatherDispatcher::dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  const int64_t R = max_rows(x_TD.dim(0));
  return {.source = gathered(step, x_TD), .rows = {d.rows.offsets_e1, d.rows.token_R.rows(0, R)}};
}

void AllGatherDispatcher::dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle&) const {
  ranks_.all_gather(step.stream, all_N, index_T);
}

void AllGatherDispatcher::combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t N = W_ * y_TD.dim(0);
  const Tensor partial_ND = step.alloc({N, y_TD.dim(1)}, y_TD.dtype);
  moebius::combine(step.stream, {.out_TD = partial_ND,
                                 .y_RD = y_RD,
                                 .pair_row_TK = d.pair_row_NK.rows(0, N),
                                 .weight_TK = d.weight_NK.rows(0, N)});
  ranks_.reduce_scatter_sum(step.stream, y_TD, partial_ND);
}

Dispatched AllGatherDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  const int64_t T = dy_TD.dim(0), R = max_rows(T);
  Dispatched grads = dispatch(step, dy_TD, handle);
  grads.weight_R = step.alloc({R}, DType::f32);
  pairs_to_rows(step.stream, {.to_R = grads.weight_R,
                              .from_TK = d.weight_NK.rows(0, W_ * T),
                              .row_pair_R = d.row_pair_R.rows(0, R),
                              .offsets_E1 = d.rows.offsets_e1});
  return grads;
}

void AllGatherDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                       DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t N = W_ * dx_TD.dim(0);
  const Tensor partial_ND = step.alloc({N, dx_TD.dim(1)}, dx_TD.dtype);
  const Tensor dweight_NK = step.alloc({N, spec_.top_k}, DType::f32), pair_row_NK = d.pair_row_NK.rows(0, N);
  moebius::combine(step.stream, {.out_TD = partial_ND, .y_RD = dx_RD, .pair_row_TK = pair_row_NK});
  rows_to_pairs(step.stream, {.to_TK = dweight_NK, .from_R = dweight_R, .pair_row_TK = pair_row_NK});
  ranks_.reduce_scatter_sum(step.stream, dx_TD, partial_ND);
  ranks_.reduce_scatter_sum(step.stream, dweight_TK, dweight_NK);
}

}  // namespace moebius
