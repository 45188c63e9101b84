#include "model/moe/dispatcher_cost.h"

#include <cmath>

#include "config/dispatcher_choice.h"

namespace moebius {
namespace {

constexpr double kIndexBytes = 4, kWeightBytes = 4;

GroupCost operator+(const GroupCost& a, const GroupCost& b) {
  return {.messages = a.messages + b.messages, .wire_bytes = a.wire_bytes + b.wire_bytes};
}

}  // namespace

DispatchCost allgather_dispatch_cost(const DispatchShape& s) {
  const double W = static_cast<double>(s.W);
  const GroupCost rows = all_gather_cost(W * s.T * s.D * s.element_bytes, s.W);
  const GroupCost pairs = all_gather_cost(W * s.T * s.K * kWeightBytes, s.W);
  return {.announce = pairs + pairs + pairs,  // experts, rows and weights of the pairs
          .dispatch = rows,
          .combine = rows,
          .combine_bwd = rows,
          .dispatch_bwd = rows + pairs};
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
  const GroupCost counts{.wire_bytes = static_cast<double>((s.W - 1) * s.ep) * kIndexBytes};
  return {.announce = counts + GroupCost{.wire_bytes = rows * s.K * (kIndexBytes + kWeightBytes)},
          .dispatch = row_bytes,
          .combine = row_bytes,
          .combine_bwd = row_bytes,
          .dispatch_bwd = row_bytes + GroupCost{.wire_bytes = rows * s.K * kWeightBytes}};
}

double even_direct_rows(const DispatchShape& s) {
  return s.T * even_rows_of_token(std::llround(s.E), std::llround(s.K), s.ep, s.W / s.ep).direct;
}

}  // namespace moebius
