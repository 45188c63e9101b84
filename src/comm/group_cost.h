// The messages and bytes that one rank sends in a call of a Group with n ranks, as formulas. They equal what
// Group::sent_bytes() counts. Traces, benchmarks and the planner use them.
#pragma once

#include <cstdint>

#include "core/tensor.h"

namespace moebius {

struct GroupCost {
  int64_t messages = 0;   // messages to other ranks (comm/message_group.h)
  double wire_bytes = 0;  // bytes of all messages
  bool operator==(const GroupCost&) const = default;
};

// bytes: the bytes of the larger tensor of the call, n times one rank's part. If n does not divide its elements, the
// parts differ by one element, and wire_bytes is the mean over the ranks. dtype: the dtype of a sum. Above level 0
// (comm/collective_levels.h) sums of bf16 are sent in f32. node: ranks of the group on a node, as in CollectiveLevels.
GroupCost all_gather_cost(double bytes, int64_t n, int node = 8);
GroupCost reduce_scatter_cost(double bytes, int64_t n, DType dtype = DType::f32, int node = 8);
GroupCost all_reduce_cost(double bytes, int64_t n, DType dtype = DType::f32, int node = 8);
// bytes: the bytes of the rows for other ranks.
GroupCost all_to_all_cost(double bytes, int64_t n);
GroupCost send_cost(double bytes);

}  // namespace moebius
