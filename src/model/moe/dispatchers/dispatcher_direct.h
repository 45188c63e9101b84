// Direct: one-sided dispatch between ranks of one machine. A token is sent once to each rank that has any of its
// experts: its own rank writes it into that rank's memory (model/moe/direct_window.h). The host reads nothing back, so
// a CUDA graph may hold all of it.
//
//   announce      The ranks exchange how many rows each of them sends to each ep rank. So before it sends, every rank
//                 knows the places of its rows in the windows of the others, and of the sums that return to its own
//                 (ops/dispatch/dispatch.h). The experts and weights of the tokens follow, and each rank sorts the rows
//                 that it will get.
//   dispatch      Rows are written to their places. The products read them through the index of the sorted rows.
//   combine       The rank of the experts sums a token's rows over k, in f32, and returns one row. The token's rank
//                 sums these in the order of the ranks, in f32. In bf16 both sums are rounded.
//   backward      The same calls with the same places. The derivatives w.r.t. the weights return as rows of L elements.
//
// If nearly all tokens have experts on all ranks (DispatcherSpec::sends_all), every token goes to all of them. Then no
// counts are exchanged, and T rows come from each rank. They are contiguous, so copy engines copy them in captured
// steps. Rows without experts at a rank are ignored there, and return as zeros, which change no sum.
//
// A rank has e = E/EP experts, so at most L = min(K, e) pairs of a token are on it. Routes, the index of the rows that
// arrive, and the derivatives that return have L columns.
//
// A round (comm/peer_window.h) separates what one rank writes from what another reads. A forward pass of a layer has
// four, or three with sends_all, and a backward pass four. In an exchange that is split (SplitDispatcher), each part
// of rows beyond the first adds one. Rows are in the order of their ranks, then of their tokens, and no sum depends
// on when a row arrives. So for ranks of one node the bits are those of the all-gather dispatcher.
//
// With T tokens per rank, n rows that it sends to other ranks, and m rows that it gets from them, a rank sends per call
//   announce  (W - 1) EP 4 + n 8 L bytes    dispatch, combine_bwd  n D elements
//   combine   m D elements                  dispatch_bwd           m (D elements + 4 L bytes)
// With balanced routing, both n and m are expected to be (W - 1)/W of ETP T times the number of ep ranks that
// have one of K experts. With sends_all, both are (W - 1) T, and no counts are sent.
#pragma once

#include <memory>
#include <string>

#include "model/moe/direct_window.h"
#include "model/moe/dispatcher.h"
#include "ops/dispatch/dispatch.h"

namespace moebius {

struct DirectHandle final : DispatchHandle {
  Tensor dest_TJ, row_TJ, back_row_TB;  // destinations of this rank's tokens: ops/dispatch/dispatch.h
  // arrive: where the rows of each rank begin among the N = W T rows that may arrive. back: where the sums of this
  // rank's experts begin in the window of each rank.
  Tensor arrive_W1, back_W;
  Tensor pair_row_NL, weight_NL;
  // True once the pass has started. Then all ranks have used the rows of earlier passes, which may be overwritten.
  bool has_begun = false;
};

class DirectDispatcher final : public SplitDispatcher {
 public:
  // Throws Error{usage} without a window.
  explicit DirectDispatcher(const DispatcherSpec& spec);
  int64_t max_rows(int64_t T) const override;
  int64_t source_rows(int64_t T) const override { return W_ * T; }
  int sending_multiprocessors(const Step& step) const override;
  std::unique_ptr<DispatchHandle> declare_saved(MemoryPlan& plan, const std::string& prefix) const override;
  void announce(Step& step, const Route& route, DispatchHandle& handle) const override;
  Dispatched dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const override;
  void dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const override;
  void combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const override;
  Dispatched combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const override;
  void dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                    DispatchHandle& handle) const override;

  Parts parts(Step& step, int64_t T, const DispatchHandle& handle) const override;
  Dispatched dispatch_part(Step& step, Tensor x_TD, const RowDistances& of, DispatchHandle& handle) const override;
  Dispatched combine_bwd_part(Step& step, Tensor dy_TD, const RowDistances& of, DispatchHandle& handle) const override;
  void return_part(Step& step, Tensor y_RD, int64_t T, const RowDistances& of, DispatchHandle& handle) const override;
  void sum_returned(Step& step, Tensor y_TD, DispatchHandle& handle) const override;
  Tensor row_weights(Step& step, int64_t T, const DispatchHandle& handle) const override;

 private:
  void find_places(Step& step, DirectHandle& handle) const;
  void exchange_counts(Step& step, DirectHandle& handle) const;
  void exchange_routes(Step& step, DirectHandle& handle) const;
  Tensor arrived(const DirectWindow::Array& at, const Tensor& x_TD) const;
  void push(Step& step, const DirectWindow::Array& to, Tensor x_TD, const DirectHandle& handle,
            const RowDistances& of = {}) const;
  // Returns the sums of the experts' rows to the ranks of their tokens. Without weights these are plain sums.
  void return_sums(Step& step, Tensor y_RD, Tensor weight_NL, int64_t T, const DirectHandle& handle,
                   const RowDistances& of = {}) const;
  // Returns the number of sums that a rank returns, and gets back for its tokens, with balanced routing.
  int64_t even_sums(int64_t T) const;
  // Adds the sums that returned for this rank's tokens, over the ranks.
  void sum_of_ranks(Step& step, Tensor out_TD, const DirectHandle& handle) const;
  void round(Step& step, const char* phase) const;
  void begin(Step& step, DirectHandle& handle) const;  // runs a round, unless the pass has started

  DispatcherSpec spec_;
  DirectWindow& window_;
  int64_t W_, P_, etp_, e_, rank_, J_, L_;  // P = EP
};

}  // namespace moebius
