// The bytes that a rank sends in each call of a dispatcher, as formulas: bench/dispatch.cc holds them
// against the counters of the group, and the planner reads them.
#pragma once

#include "comm/group_cost.h"

namespace moebius {

struct DispatchShape {
  double T = 0, D = 0, K = 0, E = 0;  // tokens of a rank, columns, experts of a token and of the layer
  int64_t W = 1;                      // ranks of etp x ep
  double element_bytes = 2;           // of a row
};

struct DispatchCost {
  GroupCost announce, dispatch, combine, combine_bwd, dispatch_bwd;
};

// model/moe/dispatcher_allgather.h.
DispatchCost allgather_dispatch_cost(const DispatchShape& s);
// model/moe/dispatcher_alltoall.h. rows: that leave the rank; of even experts T K ETP (W - 1) / W.
DispatchCost alltoall_dispatch_cost(const DispatchShape& s, double rows);

}  // namespace moebius
