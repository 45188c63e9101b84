#include "model/moe/dispatchers/dispatcher_alltoall.h"

#include <algorithm>
#include <numeric>

#include "model/moe/expert_rows.h"
#include "ops/elementwise/elementwise.h"
#include "ops/permute/index_rows.h"
#include "ops/permute/permute.h"

namespace moebius {
namespace {

AllToAllHandle& own(DispatchHandle& handle) { return dynamic_cast<AllToAllHandle&>(handle); }

// Returns rows that may be narrower than the memory was planned for.
Tensor narrower(const Tensor& buffer, int64_t rows, int64_t columns) {
  MOEBIUS_ASSERT(rows <= buffer.dim(0) && columns <= buffer.dim(1));
  return buffer.view({buffer.numel()}).rows(0, rows * columns).view({rows, columns});
}

Tensor column(const Tensor& x_R) { return x_R.view({x_R.numel(), 1}); }

}  // namespace

AllToAllDispatcher::AllToAllDispatcher(const DispatcherSpec& spec)
    : spec_(spec),
      ranks_(group_of_experts(*spec.mesh)),
      W_(ranks_.size()),
      E_(spec.num_experts),
      e_(spec.num_experts / spec.mesh->shape().ep),
      ep_(spec.mesh->shape().ep),
      etp_(spec.mesh->shape().etp),
      first_expert_(e_ * spec.mesh->place().ep) {}

int64_t AllToAllDispatcher::max_rows(int64_t T) const {
  return max_expert_rows(spec_.mesh->shape(), E_, spec_.top_k, T, spec_.rows_factor);
}

std::unique_ptr<DispatchHandle> AllToAllDispatcher::declare_saved(MemoryPlan& plan, const std::string& prefix) const {
  auto handle = std::make_unique<AllToAllHandle>();
  AllToAllHandle& d = *handle;
  const int64_t R = worst_rows(spec_.max_tokens);  // the index is computed before the counts are read
  plan.declare(d.counts_WE, prefix + ".counts", {W_, E_}, DType::i32, Life::saved);
  plan.declare(d.rows.offsets_e1, prefix + ".offsets", {e_ + 1}, DType::i32, Life::saved);
  plan.declare(d.rows.token_R, prefix + ".arrival", {R}, DType::i32, Life::saved);
  plan.declare(d.row_R, prefix + ".row", {R}, DType::i32, Life::saved);
  return handle;
}

void AllToAllDispatcher::announce(Step& step, const Route& route, DispatchHandle& handle) const {
  AllToAllHandle& d = own(handle);
  Stream& s = step.stream;
  d.route = route;
  ranks_.all_gather(s, d.counts_WE, route.counts_E.view({1, E_}));
  index_arrivals(s, {.offsets_e1 = d.rows.offsets_e1,
                     .arrival_R = d.rows.token_R,
                     .row_R = d.row_R,
                     .counts_WE = d.counts_WE,
                     .first_expert = first_expert_});
  d.send_rows.clear();
  d.recv_rows.clear();
  if (s.device() == DeviceKind::null) return;
  if (d.counts.num_bytes() == 0) d.counts = HostBuffer(s.device(), d.counts_WE.num_bytes());
  copy_to_host(s, d.counts.data(), d.counts_WE.data, d.counts_WE.num_bytes(), CopyWait::async);
}

// Rank q = etp + ETP ep of the group gets the rows for the experts of its ep.
void AllToAllDispatcher::wait_for_counts(Stream& s, int64_t T, AllToAllHandle& d) const {
  if (!d.send_rows.empty()) return;
  // The null device has no counts, so every rank sends the same number of rows to each other rank.
  const int64_t even = s.device() == DeviceKind::null ? std::min(T * spec_.top_k / ep_, max_rows(T) / W_) : 0;
  d.send_rows.assign(W_, even);
  d.recv_rows.assign(W_, even);
  if (s.device() == DeviceKind::null) return;
  synchronize(s);
  const auto* counts = static_cast<const int32_t*>(d.counts.data());
  check_rows(T, counts);
  const auto rows = [&](int64_t from, int64_t first_expert) {
    const int32_t* first = counts + from * E_ + first_expert;
    return std::accumulate(first, first + e_, int64_t{0});
  };
  for (int64_t q = 0; q < W_; ++q) {
    d.send_rows[q] = rows(ranks_.rank(), q / etp_ * e_);
    d.recv_rows[q] = rows(q, first_expert_);
  }
}

// Every rank of the group checks the rows of all ep ranks, so that all ranks end in the same way.
void AllToAllDispatcher::check_rows(int64_t T, const int32_t* counts_WE) const {
  if (spec_.rows_factor == 0) return;
  for (int64_t ep = 0; ep < ep_; ++ep) {
    int64_t rows = 0;
    for (int64_t from = 0; from < W_; ++from)
      for (int64_t e = ep * e_; e < (ep + 1) * e_; ++e) rows += counts_WE[from * E_ + e];
    MOEBIUS_CHECK(usage, rows <= max_rows(T),
                  "moe.rank_rows_factor = {} plans for {} rows at the experts of a rank; the tokens of {} chose {} for "
                  "ep rank {}; raise it (0: memory for the worst case, {} rows), or balance the experts",
                  spec_.rows_factor, max_rows(T), spec_.layer, rows, ep, worst_rows(T));
  }
}

void AllToAllDispatcher::send(Step& step, Tensor arrived, Tensor sorted, AllToAllHandle& d) const {
  StackScope scope(step.stack);
  Tensor out = sorted;
  if (etp_ > 1) {
    out = step.alloc({etp_ * sorted.dim(0), sorted.dim(1)}, sorted.dtype);
    int64_t to = 0, from = 0;
    for (int64_t q = 0; q < W_; ++q) {
      const int64_t n = d.send_rows[q];
      copy(step.stream, out.rows(to, to + n), sorted.rows(from, from + n));
      to += n;
      if (q % etp_ == etp_ - 1) from += n;
    }
  }
  ranks_.all_to_all_v(step.stream, {.out = arrived, .in = out, .recv_rows = d.recv_rows, .send_rows = d.send_rows});
}

void AllToAllDispatcher::send_back(Step& step, Tensor sorted, Tensor arrived, AllToAllHandle& d) const {
  StackScope scope(step.stack);
  const Tensor back = etp_ > 1 ? step.alloc({etp_ * sorted.dim(0), sorted.dim(1)}, sorted.dtype) : sorted;
  ranks_.all_to_all_v(step.stream, {.out = back, .in = arrived, .recv_rows = d.send_rows, .send_rows = d.recv_rows});
  if (etp_ == 1) return;
  int64_t to = 0, from = 0;
  for (int64_t q = 0; q < W_; ++q) {
    const int64_t n = d.send_rows[q];
    const Tensor sum = sorted.rows(to, to + n), partial = back.rows(from, from + n);
    if (q % etp_ == 0)
      copy(step.stream, sum, partial);
    else
      add(step.stream, sum, partial);
    from += n;
    if (q % etp_ == etp_ - 1) to += n;
  }
}

Dispatched AllToAllDispatcher::dispatch(Step& step, Tensor x_TD, DispatchHandle& handle) const {
  return bring(step, x_TD, spec_.rows ? spec_.rows->scratch().tokens : Tensor{}, handle);
}

Dispatched AllToAllDispatcher::bring(Step& step, Tensor x_TD, const Tensor& buffer, DispatchHandle& handle) const {
  AllToAllHandle& d = own(handle);
  const int64_t T = x_TD.dim(0), D = x_TD.dim(1), R = max_rows(T);
  const Tensor arrived_RD = buffer.empty() ? step.alloc({R, D}, x_TD.dtype) : narrower(buffer, R, D);
  StackScope scope(step.stack);
  const Tensor sorted_ND = step.alloc({T * spec_.top_k, D}, x_TD.dtype);
  gather_rows(step.stream,
              {.to_RD = sorted_ND, .from_ND = x_TD, .row_R = d.route.row_token_R, .offsets_E1 = d.route.offsets_E1});
  wait_for_counts(step.stream, T, d);
  send(step, arrived_RD, sorted_ND, d);
  return {.source = arrived_RD, .rows = {d.rows.offsets_e1, d.rows.token_R.rows(0, R)}};
}

// The indices are sent as rows of one f32; nothing interprets their bits. They arrive on the step stack, since the
// memory of ExpertRows has the rows of tokens, which the products have yet to read.
void AllToAllDispatcher::dispatch_index(Step& step, Tensor all_N, Tensor index_T, DispatchHandle& handle) const {
  StackScope scope(step.stack);
  Tensor words_T1 = index_T.view({index_T.dim(0), 1});
  words_T1.dtype = DType::f32;
  Tensor arrived_R1 = bring(step, words_T1, Tensor{}, handle).source;
  arrived_R1.dtype = DType::i32;
  copy(step.stream, all_N, arrived_R1.view({arrived_R1.dim(0)}));
}

void AllToAllDispatcher::combine(Step& step, Tensor y_TD, Tensor y_RD, DispatchHandle& handle) const {
  AllToAllHandle& d = own(handle);
  StackScope scope(step.stack);
  const Tensor back_ND = returned(step, y_RD, y_TD.dim(0), d);
  moebius::combine(
      step.stream,
      {.out_TD = y_TD, .y_RD = back_ND, .pair_row_TK = d.route.pair_row_TK, .weight_TK = d.route.weight_TK});
}

// Sends the rows of the experts here back to the ranks that sent them. The rows that return
// are sorted by expert.
Tensor AllToAllDispatcher::returned(Step& step, Tensor rows_RD, int64_t T, AllToAllHandle& d) const {
  const int64_t R = rows_RD.dim(0), D = rows_RD.dim(1);
  const Tensor sorted_ND = step.alloc({T * spec_.top_k, D}, rows_RD.dtype);
  StackScope scope(step.stack);
  const bool has_room = spec_.rows && D == spec_.rows->scratch().sent.dim(1);  // weights of rows are on the stack
  const Tensor arrived_RD = has_room ? spec_.rows->scratch().sent.rows(0, R) : step.alloc({R, D}, rows_RD.dtype);
  gather_rows(step.stream, {.to_RD = arrived_RD,
                            .from_ND = rows_RD,
                            .row_R = d.row_R.rows(0, R),
                            .offsets_E1 = d.rows.offsets_e1,
                            .expected_rows = std::min(R, T * spec_.top_k * etp_)});
  send_back(step, sorted_ND, arrived_RD, d);
  return sorted_ND;
}

Dispatched AllToAllDispatcher::combine_bwd(Step& step, Tensor dy_TD, DispatchHandle& handle) const {
  AllToAllHandle& d = own(handle);
  const int64_t N = dy_TD.dim(0) * spec_.top_k;
  Dispatched grads = bring(step, dy_TD, spec_.rows ? spec_.rows->scratch().grads : Tensor{}, handle);
  const int64_t R = grads.rows.token_R.dim(0);
  grads.weight_R = step.alloc({R}, DType::f32);
  StackScope scope(step.stack);
  const Tensor weight_N = step.alloc({N}, DType::f32), arrived_R1 = step.alloc({R, 1}, DType::f32);
  pairs_to_rows(step.stream, {.to_R = weight_N,
                              .from_TK = d.route.weight_TK,
                              .row_pair_R = d.route.row_pair_R,
                              .offsets_E1 = d.route.offsets_E1});
  send(step, arrived_R1, column(weight_N), d);
  gather_rows(step.stream, {.to_RD = column(grads.weight_R),
                            .from_ND = arrived_R1,
                            .row_R = grads.rows.token_R,
                            .offsets_E1 = grads.rows.offsets_e1});
  return grads;
}

void AllToAllDispatcher::dispatch_bwd(Step& step, Tensor dx_TD, Tensor dweight_TK, Tensor dx_RD, Tensor dweight_R,
                                      DispatchHandle& handle) const {
  AllToAllHandle& d = own(handle);
  StackScope scope(step.stack);
  const int64_t T = dx_TD.dim(0);
  const Tensor& pair_row_TK = d.route.pair_row_TK;
  moebius::combine(step.stream, {.out_TD = dx_TD, .y_RD = returned(step, dx_RD, T, d), .pair_row_TK = pair_row_TK});
  const Tensor dweight_N = returned(step, column(dweight_R), T, d).view({T * spec_.top_k});
  rows_to_pairs(step.stream, {.to_TK = dweight_TK, .from_R = dweight_N, .pair_row_TK = pair_row_TK});
}

}  // namespace moebius
