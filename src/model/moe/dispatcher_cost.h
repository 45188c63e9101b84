// The bytes that a rank sends in each call of a dispatcher, as formulas. bench/dispatch.cc compares them with the byte
// counters of groups, and the planner uses them.
#pragma once

#include "comm/group_cost.h"

namespace moebius {

struct DispatchShape {
  double T = 0, D = 0, K = 0, E = 0;  // tokens of a rank, columns, experts of a token and of the layer
  int64_t W = 1;                      // ranks of etp x ep
  int64_t ep = 1;                     // ep ranks; read for direct and two-level
  int64_t node = 8;                   // ranks of a node (MeshShape::ranks_per_node)
  double element_bytes = 2;           // bytes of an element of a row
  bool round_robin = false;           // moe.force_balance (chance_of_part() in config/dispatcher_choice.h)
  bool sends_all = false;             // direct: every token goes to all ranks (sends_all_tokens() there)
};

struct DispatchCost {
  GroupCost announce, dispatch, combine, combine_bwd, dispatch_bwd;
};

// The cost of model/moe/dispatchers/dispatcher_allgather.h. Sums of bf16 over levels are sent in f32 above level 0
// (comm/group_cost.h).
DispatchCost allgather_dispatch_cost(const DispatchShape& s);
// The cost of model/moe/dispatchers/dispatcher_alltoall.h. rows: the rows that leave the rank, T K ETP (W - 1) / W
// with balanced routing.
DispatchCost alltoall_dispatch_cost(const DispatchShape& s, double rows);
// The cost of model/moe/dispatchers/dispatcher_direct.h, which sends no messages. rows: the rows that leave the rank.
// On average over the ranks, the same number of rows returns.
DispatchCost direct_dispatch_cost(const DispatchShape& s, double rows);
// The cost of model/moe/dispatchers/dispatcher_two_level.h. across: the rows that the rank sends to other nodes; on
// average over the ranks, the same number of sums returns. inside: the rows that it sends to ranks of its node.
struct TwoLevelCost {
  DispatchCost across, inside;  // `inside` is not set if nothing is sent inside nodes
};
TwoLevelCost two_level_dispatch_cost(const DispatchShape& s, double across, double inside);
// Returns the expected number of a rank's tokens that have an expert in a given one of `parts` equal parts of the
// experts, with balanced routing: T chance_of_part(). On M nodes the expected rows are
//   across   (M - 1) even_rows_of_part(s, M)
//   inside   (W - M) even_rows_of_part(s, EP)
double even_rows_of_part(const DispatchShape& s, int64_t parts);
// Returns the expected `rows` of direct_dispatch_cost() with balanced routing: T (W - 1) times the probability that a
// given rank has one of a token's K experts, chance_of_part(). With sends_all it is T (W - 1), for any routing.
double even_direct_rows(const DispatchShape& s);

}  // namespace moebius
