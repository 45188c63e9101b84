#include "model/moe/dispatcher_cost.h"

#include <algorithm>
#include <cmath>

#include "config/dispatcher_choice.h"

namespace moebius {
namespace {

constexpr double kIndexBytes = 4, kWeightBytes = 4, kSumBytes = 4;

// The pairs of a row at one rank, at most.
double pairs_of_row(const DispatchShape& s) { return std::min(s.K, s.E / static_cast<double>(s.ep)); }

GroupCost operator+(const GroupCost& a, const GroupCost& b) {
  return {.messages = a.messages + b.messages, .wire_bytes = a.wire_bytes + b.wire_bytes};
}

}  // namespace

DispatchCost allgather_dispatch_cost(const DispatchShape& s) {
  const double W = static_cast<double>(s.W), row_bytes = W * s.T * s.D * s.element_bytes;
  const int node = static_cast<int>(s.node);
  const GroupCost rows = all_gather_cost(row_bytes, s.W, node);
  const GroupCost sums = reduce_scatter_cost(row_bytes, s.W, s.element_bytes == 2 ? DType::bf16 : DType::f32, node);
  const GroupCost pairs = all_gather_cost(W * s.T * s.K * kWeightBytes, s.W, node);
  return {.announce = pairs + pairs + pairs,  // experts, rows and weights of the pairs
          .dispatch = rows,
          .combine = sums,
          .combine_bwd = rows,
          .dispatch_bwd = sums + pairs};
}

DispatchCost alltoall_dispatch_cost(const DispatchShape& s, double rows) {
  const GroupCost row_bytes = all_to_all_cost(rows * s.D * s.element_bytes, s.W);
  const GroupCost weights = all_to_all_cost(rows * kWeightBytes, s.W);
  return {.announce = all_gather_cost(static_cast<double>(s.W) * s.E * kIndexBytes, s.W),
          .dispatch = row_bytes,
          .combine = row_bytes,
          .combine_bwd = row_bytes + weights,
          .dispatch_bwd = row_bytes + weights};
}

DispatchCost direct_dispatch_cost(const DispatchShape& s, double rows) {
  const GroupCost row_bytes{.wire_bytes = rows * s.D * s.element_bytes};
  const GroupCost counts{.wire_bytes = s.sends_all ? 0 : static_cast<double>((s.W - 1) * s.ep) * kIndexBytes};
  const double pairs = rows * pairs_of_row(s);
  return {.announce = counts + GroupCost{.wire_bytes = pairs * (kIndexBytes + kWeightBytes)},
          .dispatch = row_bytes,
          .combine = row_bytes,
          .combine_bwd = row_bytes,
          .dispatch_bwd = row_bytes + GroupCost{.wire_bytes = pairs * kWeightBytes}};
}

TwoLevelCost two_level_dispatch_cost(const DispatchShape& s, double across, double inside) {
  const int64_t nodes = s.W / s.node;
  const auto sent = [&](double bytes) { return GroupCost{.messages = nodes - 1, .wire_bytes = bytes}; };
  const auto written = [](double bytes) { return GroupCost{.wire_bytes = bytes}; };
  const GroupCost counts = sent(static_cast<double>(nodes - 1) * kIndexBytes);
  const GroupCost rows = sent(across * s.D * s.element_bytes), sums = sent(across * s.D * kSumBytes);
  const GroupCost counts_inside = written(static_cast<double>((s.node - 1) * s.ep) * kIndexBytes);
  const GroupCost rows_inside = written(inside * s.D * s.element_bytes);
  const double pairs_inside = inside * pairs_of_row(s);
  return {.across = {.announce = counts + sent(across * s.K * (kIndexBytes + kWeightBytes)),
                     .dispatch = rows,
                     .combine = sums,
                     .combine_bwd = rows,
                     .dispatch_bwd = sums + sent(across * s.K * kWeightBytes)},
          .inside = {.announce = counts_inside + written(pairs_inside * (kIndexBytes + kWeightBytes)),
                     .dispatch = rows_inside,
                     .combine = rows_inside,
                     .combine_bwd = rows_inside,
                     .dispatch_bwd = rows_inside + written(pairs_inside * kWeightBytes)}};
}

double even_rows_of_part(const DispatchShape& s, int64_t parts) {
  return s.T * chance_of_part(std::llround(s.E), std::llround(s.K), parts, s.round_robin);
}

double even_direct_rows(const DispatchShape& s) {
  return static_cast<double>(s.W - 1) * (s.sends_all ? s.T : even_rows_of_part(s, s.ep));
}

}  // namespace moebius
