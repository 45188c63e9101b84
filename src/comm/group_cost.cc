#include "comm/group_cost.h"

namespace moebius {

GroupCost all_gather_cost(double bytes, int64_t n) {
  return {.messages = n - 1, .wire_bytes = bytes * static_cast<double>(n - 1) / static_cast<double>(n)};
}

GroupCost reduce_scatter_cost(double bytes, int64_t n) { return all_gather_cost(bytes, n); }

GroupCost all_reduce_cost(double bytes, int64_t n) {
  const GroupCost half = all_gather_cost(bytes, n);
  return {.messages = 2 * half.messages, .wire_bytes = 2 * half.wire_bytes};
}

GroupCost all_to_all_cost(double bytes, int64_t n) { return {.messages = n - 1, .wire_bytes = bytes}; }

GroupCost send_cost(double bytes) { return {.messages = 1, .wire_bytes = bytes}; }

}  // namespace moebius
