#include "model/moe/exchange_estimate.h"

#include <algorithm>

#include "comm/collective_levels.h"

namespace moebius {
namespace {

constexpr double kIndexBytes = 4, kWeightBytes = 4;

// Bytes that a rank sends in a call.
struct PlacedBytes {
  double across = 0, inside = 0;
};

// The sum of a dispatcher's calls.
class Calls {
 public:
  explicit Calls(const ExchangeRates& rates) : rates_(rates) {}

  // Adds a call whose messages are sent at the same time.
  void add_at_once(const PlacedBytes& b) {
    count(b);
    total_.seconds +=
        rates_.across_call_s + std::max(b.across / rates_.across_bytes_s, b.inside / rates_.inside_bytes_s);
  }
  // Adds a call whose messages across nodes are sent before those inside them, or after them.
  void add_in_turn(const PlacedBytes& b) {
    count(b);
    total_.seconds += rates_.across_call_s + b.across / rates_.across_bytes_s;
    total_.seconds += rates_.inside_call_s + b.inside / rates_.inside_bytes_s;
  }
  const ExchangeEstimate& total() const { return total_; }

 private:
  void count(const PlacedBytes& b) {
    total_.across_bytes += b.across;
    total_.inside_bytes += b.inside;
  }

  const ExchangeRates& rates_;
  ExchangeEstimate total_;
};

class Estimates {
 public:
  Estimates(const ExchangeShape& x, const ExchangeRates& rates)
      : x_(x),
        rates_(rates),
        W_(static_cast<double>(x.rows.W)),
        N_(static_cast<double>(x.rows.node)),
        M_(W_ / N_),
        sent_bytes_(x.rows.T * x.rows.D * x.sent_element_bytes),
        back_bytes_(x.rows.T * x.rows.D * x.rows.element_bytes) {}

  ExchangeEstimate allgather() const {
    Calls calls(rates_);
    const double pairs = x_.rows.T * x_.rows.K * kWeightBytes;
    for (int i = 0; i < 3; ++i) gather(calls, pairs);        // experts, rows and weights of the pairs
    for (int i = 0; i < 3; ++i) gather(calls, sent_bytes_);  // x twice, and dy
    for (int i = 0; i < 2; ++i) sum(calls);                  // y and dx
    gather(calls, pairs);                                    // derivatives of the weights
    return calls.total();
  }

  ExchangeEstimate alltoall() const {
    Calls calls(rates_);
    const double rows = x_.rows.K * W_ / static_cast<double>(x_.rows.ep) * (W_ - 1) / W_;  // for each token
    const auto exchange = [&](double bytes) { calls.add_at_once(to_each(bytes / (W_ - 1))); };
    gather(calls, x_.rows.E * kIndexBytes);
    for (int i = 0; i < 3; ++i) exchange(rows * sent_bytes_);
    for (int i = 0; i < 2; ++i) exchange(rows * back_bytes_);
    for (int i = 0; i < 2; ++i) exchange(rows * x_.rows.T * kWeightBytes);
    return calls.total();
  }

  ExchangeEstimate two_level() const {
    const bool is_fixed = x_.on_gpu && x_.captures;
    const double across = (M_ - 1) * (is_fixed ? x_.rows.T : even_rows_of_part(x_.rows, x_.rows.W / x_.rows.node));
    const double inside = (W_ - M_) * even_rows_of_part(x_.rows, x_.rows.ep);
    DispatchShape sent = x_.rows;
    sent.element_bytes = x_.sent_element_bytes;
    const TwoLevelCost there = two_level_dispatch_cost(sent, across, inside),
                       back = two_level_dispatch_cost(x_.rows, across, inside);
    Calls calls(rates_);
    const auto add = [&](const TwoLevelCost& cost, GroupCost DispatchCost::*call, double unsent = 0) {
      calls.add_in_turn({(cost.across.*call).wire_bytes - unsent, (cost.inside.*call).wire_bytes});
    };
    add(there, &DispatchCost::announce, is_fixed ? (M_ - 1) * kIndexBytes : 0);  // no counts for nodes
    for (int i = 0; i < 2; ++i) add(there, &DispatchCost::dispatch);
    add(back, &DispatchCost::combine);
    add(there, &DispatchCost::combine_bwd);
    add(back, &DispatchCost::dispatch_bwd);
    return calls.total();
  }

 private:
  // Returns a message of these bytes to every other rank.
  PlacedBytes to_each(double bytes) const { return {(W_ - N_) * bytes, (N_ - 1) * bytes}; }
  // Returns a ring's bytes of each rank. One link of a node crosses to the next node, and NCCL has a ring for the link
  // of each of its ranks.
  PlacedBytes around_ring(double bytes) const { return {(W_ - 1) / N_ * bytes, (W_ - 1) * (1 - 1 / N_) * bytes}; }
  // Returns the bytes of levels of which the first is a node (comm/collective_levels.h).
  PlacedBytes in_levels(const GroupCost& cost, double bytes) const {
    const double inside = M_ * (N_ - 1) * bytes;
    return {cost.wire_bytes - inside, inside};
  }

  // Adds a gather of these bytes from each rank.
  void gather(Calls& calls, double bytes) const {
    if (!x_.on_gpu) return calls.add_in_turn(in_levels(all_gather_cost(W_ * bytes, x_.rows.W, node()), bytes));
    const bool sends_to_each = !x_.rings && x_.rows.W <= CollectiveLevels::kMaxRadix;
    calls.add_at_once(sends_to_each ? to_each(bytes) : around_ring(bytes));
  }
  // Adds a sum of rows that return.
  void sum(Calls& calls) const {
    if (x_.on_gpu && x_.rings) return calls.add_at_once(around_ring(back_bytes_));
    const DType dtype = x_.rows.element_bytes == 2 ? DType::bf16 : DType::f32;
    const GroupCost cost = reduce_scatter_cost(W_ * back_bytes_, x_.rows.W, dtype, node());
    calls.add_in_turn(in_levels(cost, back_bytes_));
  }
  int node() const { return static_cast<int>(x_.rows.node); }

  const ExchangeShape& x_;
  const ExchangeRates& rates_;
  double W_, N_, M_;                // ranks, ranks of a node, nodes
  double sent_bytes_, back_bytes_;  // of the rows of a rank's tokens, to the experts and back
};

}  // namespace

ExchangeEstimates exchange_estimates(const ExchangeShape& x, const ExchangeRates& rates) {
  const Estimates estimates(x, rates);
  return {.allgather = estimates.allgather(),
          .alltoall = estimates.alltoall(),
          .two_level = estimates.two_level(),
          .rates = fmt::format("{:.3g} GB/s across nodes and {:.3g} GB/s inside, {}", rates.across_bytes_s / 1e9,
                               rates.inside_bytes_s / 1e9, rates.source)};
}

}  // namespace moebius
