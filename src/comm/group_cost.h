// The bytes that one rank sends in a call of a group, as closed formulas: those of Group::sent_bytes()
// for n ranks. Traces, benchmarks and the planner read them.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace moebius {

struct GroupCost {
  int64_t messages = 0;   // sent to other ranks, over messages (comm/message_group.h)
  double wire_bytes = 0;  // of all of them
  bool operator==(const GroupCost&) const = default;
};

// bytes: of the larger of the call's tensors, n times one rank's part. The parts may differ by one
// element where n does not divide; then wire_bytes is the mean over the ranks.
// dtype: of a sum. Above level 0 (comm/collective_levels.h) the sums of bf16 travel in f32.
// node: the ranks of a node, as CollectiveLevels has it.
GroupCost all_gather_cost(double bytes, int64_t n, int node = 8);
GroupCost reduce_scatter_cost(double bytes, int64_t n, DType dtype = DType::f32, int node = 8);
GroupCost all_reduce_cost(double bytes, int64_t n, DType dtype = DType::f32, int node = 8);
// bytes: that the rank has for others.
GroupCost all_to_all_cost(double bytes, int64_t n);
GroupCost send_cost(double bytes);

}  // namespace moebius
