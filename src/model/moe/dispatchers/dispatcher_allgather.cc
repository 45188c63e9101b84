#include "model/moe/dispatchers/dispatcher_allgather.h"

#include <algorithm>

#include "model/moe/expert_rows.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/local_pairs.h"
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
      L_(std::min(spec.top_k, e_)),
      first_expert_(e_ * spec.mesh->place().ep) {}

int64_t AllGatherDispatcher::max_rows(int64_t T) const {
  return max_expert_rows(spec_.mesh->shape(), spec_.num_experts, spec_.top_k, T, /*rows_factor=*/0);
}

int64_t AllGatherDispatcher::even_rows(int64_t T) const { return T * spec_.top_k * spec_.mesh->shape().etp; }

std::unique_ptr<DispatchHandle> AllGatherDispatcher::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto handle = std::make_unique<AllGatherHandle>();
  AllGatherHandle& d = *handle;
  const int64_t N = W_ * spec_.max_tokens, R = max_rows(spec_.max_tokens);
  plan.declare(d.rows.offsets_e1, prefix + ".offsets", {e_ + 1}, DType::i32, Life::saved);
  plan.declare(d.rows.token_R, prefix + ".row_token", {R}, DType::i32, Life::saved);
  plan.declare(d.pair_row_NL, prefix + ".pair_row", {N, L_}, DType::i32, Life::saved);
  plan.declare(d.k_NL, prefix + ".pair_k", {N, L_}, DType::i32, Life::saved);
  plan.declare(d.weight_NL, prefix + ".weight", {N, L_}, DType::f32, Life::saved);
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
  const Tensor topk_NL = step.alloc({N, L_}, DType::i32);
  local_pairs(step.stream, {.topk_NL = topk_NL,
                            .k_NL = d.k_NL.rows(0, N),
                            .weight_NL = d.weight_NL.rows(0, N),
                            .topk_NK = gathered(step, route.topk_TK),
                            .kept_NK = gathered(step, route.pair_row_TK),
                            .weight_NK = gathered(step, route.weight_TK),
                            .first_expert = first_expert_,
                            .num_experts = e_});
  index_rows(step.stream, {.offsets_e1 = d.rows.offsets_e1,
                           .row_token_R = d.rows.token_R,
                           .pair_row_TK = d.pair_row_NL.rows(0, N),
                           .scratch = step.alloc_bytes(IndexRows::scratch_bytes(N, e_, step.stream)),
                           .topk_TK = topk_NL,
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
                                 .pair_row_TK = d.pair_row_NL.rows(0, N),
                                 .weight_TK = d.weight_NL.rows(0, N),
                                 .expected_pairs = even_rows(y_TD.dim(0))});
  ranks_.reduce_scatter_sum(step.stream, y_TD, partial_ND);
}

Dispatched AllGatherDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  const int64_t T = dy_TD.dim(0), R = max_rows(T);
  Dispatched grads = dispatch(step, dy_TD, handle);
  grads.weight_R = step.alloc({R}, DType::f32);
  local_pairs_to_rows(
      step.stream,
      {.to_R = grads.weight_R, .from_NL = d.weight_NL.rows(0, W_ * T), .pair_row_NL = d.pair_row_NL.rows(0, W_ * T)});
  return grads;
}

void AllGatherDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                       DispatchHandle& handle) const {
  AllGatherHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t N = W_ * dx_TD.dim(0);
  const Tensor partial_ND = step.alloc({N, dx_TD.dim(1)}, dx_TD.dtype);
  const Tensor dweight_NK = step.alloc({N, spec_.top_k}, DType::f32), pair_row_NL = d.pair_row_NL.rows(0, N);
  moebius::combine(
      step.stream,
      {.out_TD = partial_ND, .y_RD = dx_RD, .pair_row_TK = pair_row_NL, .expected_pairs = even_rows(dx_TD.dim(0))});
  rows_to_all_pairs(step.stream,
                    {.to_NK = dweight_NK, .from_R = dweight_R, .pair_row_NL = pair_row_NL, .k_NL = d.k_NL.rows(0, N)});
  ranks_.reduce_scatter_sum(step.stream, dx_TD, partial_ND);
  ranks_.reduce_scatter_sum(step.stream, dweight_TK, dweight_NK);
}

}  // namespace moebius
