#include "comm/group_cost.h"

#include "comm/collective_levels.h"

namespace moebius {

GroupCost all_gather_cost(double bytes, int64_t n, int node) {
  return {.messages = CollectiveLevels(static_cast<int>(n), node).messages(),
          .wire_bytes = bytes * static_cast<double>(n - 1) / static_cast<double>(n)};
}

GroupCost reduce_scatter_cost(double bytes, int64_t n, DType dtype, int node) {
  GroupCost cost = all_gather_cost(bytes, n, node);
  const CollectiveLevels levels(static_cast<int>(n), node);
  if (dtype == DType::bf16) cost.wire_bytes += bytes / levels.radix(0) - bytes / static_cast<double>(n);
  return cost;
}

GroupCost all_reduce_cost(double bytes, int64_t n, DType dtype, int node) {
  const GroupCost sums = reduce_scatter_cost(bytes, n, dtype, node), rest = all_gather_cost(bytes, n, node);
  return {.messages = sums.messages + rest.messages, .wire_bytes = sums.wire_bytes + rest.wire_bytes};
}

GroupCost all_to_all_cost(double bytes, int64_t n) { return {.messages = n - 1, .wire_bytes = bytes}; }

GroupCost send_cost(double bytes) { return {.messages = 1, .wire_bytes = bytes}; }

}  // namespace moebius
