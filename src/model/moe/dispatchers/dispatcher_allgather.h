// All-gather: the tokens and routes of all ranks of etp x ep are gathered. Each rank computes the rows of its experts,
// and sums them into a partial result for every token. The results are reduce-scattered. Shapes do not depend on the
// routing, and the host reads nothing back.
//
// With T tokens per rank and W ranks, a rank sends in each call
//   announce  (W - 1) T K * 12 bytes      dispatch, combine_bwd  (W - 1) T D elements
//   combine   (W - 1) T D elements        dispatch_bwd           (W - 1) T (D elements + 4 K bytes)
// If the ranks are on several nodes, sums of bf16 send more (comm/group_cost.h).
//
// A token's sum runs over k on each rank, and then over the ranks in the order of their group (comm/group.h). In bf16
// each partial result is rounded.
#pragma once

#include <memory>
#include <string>

#include "model/moe/dispatcher.h"

namespace moebius {

// Its rows are those of the N = W T tokens of all ranks.
struct AllGatherHandle final : DispatchHandle {
  // A token has at most L = min(K, e) pairs with the rank's e experts, in the order of k.
  Tensor pair_row_NL, k_NL, weight_NL;
};

class AllGatherDispatcher final : public Dispatcher {
 public:
  explicit AllGatherDispatcher(const DispatcherSpec& spec);
  int64_t max_rows(int64_t T) const override;
  int64_t source_rows(int64_t T) const override { return W_ * T; }
  std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;
  void announce(Step& step, const Route& route, DispatchHandle& handle) const override;
  Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const override;
  void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    DispatchHandle& handle) const override;

 private:
  Tensor gathered(Step& step, Tensor x) const;
  int64_t even_rows(int64_t T) const;  // rows of this rank's experts with balanced routing

  DispatcherSpec spec_;
  Group& ranks_;
  int64_t W_, e_, L_, first_expert_;
};

}  // namespace moebius
