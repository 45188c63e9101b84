// All-to-all: a row is sent only to the ranks of its expert. Rows are sorted by expert, exchanged over etp x ep, and
// returned by the reverse exchange. So a token's sum is computed as on one rank: over k, in order. With etp each row is
// sent to all ETP ranks of its expert, which return partial results. These are added in the order of their ranks.
//
// Buffers are planned for the worst case, in which every token of every rank chooses experts of this rank. rows_factor
// > 0 bounds them to factor T K ETP rows. If the tokens of a layer then need more rows on any rank, all ranks throw
// Error{usage}, since each has the counts of all.
//
// The sizes of an exchange depend on the choices of the tokens. The ranks send each other their
// counts, which are copied to the host after the gather of the rows of the first dispatch. The
// host waits there, once for each layer and micro-batch, and nowhere else. So this exchange
// cannot be part of a CUDA graph.
//
// With T tokens per rank, W ranks, no drops and balanced routing, a rank is expected
// to send in each call
//   announce  (W - 1) E 4 bytes                dispatch, combine   T K ETP (W - 1)/W rows of D elements
//   combine_bwd, dispatch_bwd  as dispatch and combine, and 4 bytes per row
#pragma once

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "model/moe/dispatcher.h"

namespace moebius {

// Its rows are the rows that arrived, sorted by expert.
struct AllToAllHandle final : DispatchHandle {
  Tensor counts_WE, row_R;                    // rows of each rank for each expert; the row of each arrived row
  HostBuffer counts;                          // counts_WE on the host
  std::vector<int64_t> send_rows, recv_rows;  // rows to and from each rank; empty until the counts are on the host
};

class AllToAllDispatcher final : public Dispatcher {
 public:
  explicit AllToAllDispatcher(const DispatcherSpec& spec);
  int64_t max_rows(int64_t T) const override;
  int64_t source_rows(int64_t T) const override { return max_rows(T); }
  std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;
  void announce(Step& step, const Route& route, DispatchHandle& handle) const override;
  Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const override;
  void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    DispatchHandle& handle) const override;

 private:
  int64_t worst_rows(int64_t T) const { return W_ * T * std::min(spec_.top_k, e_); }
  void wait_for_counts(Stream& s, int64_t T, AllToAllHandle& handle) const;
  void check_rows(int64_t T, const int32_t* counts_WE) const;
  // Sends the rows of this rank's tokens to the experts, into `buffer` or onto the step stack.
  Dispatched bring(Step& step, Tensor x_TD, const Tensor& buffer, DispatchHandle& handle) const;
  Tensor returned(Step& step, Tensor rows_RD, int64_t T, AllToAllHandle& handle) const;
  // send() sends rows of the route, sorted by expert, to the ranks of their experts. send_back() returns the results,
  // summed over etp.
  void send(Step& step, Tensor arrived, Tensor sorted, AllToAllHandle& handle) const;
  void send_back(Step& step, Tensor sorted, Tensor arrived, AllToAllHandle& handle) const;

  DispatcherSpec spec_;
  Group& ranks_;
  int64_t W_, E_, e_, ep_, etp_, first_expert_;
};

}  // namespace moebius
