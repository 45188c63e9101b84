// The bytes and the time of dispatch and combine: the exchange of rows between tokens and their experts on other ranks.
// The groups of the dry run count the messages of the engine's all-gather, all-to-all and two-level dispatchers, and
// the largest magnitudes that ranks exchange with any of its dispatchers. This file computes the rest: one-sided
// writes to other ranks, and what dispatchers of other software send.
#pragma once

#include "plan/work_time.h"

namespace moebius {

// Returns whether the axis is that of the ranks that share experts.
bool is_expert_axis(Axis axis);
// Returns the axis of the ranks that share experts.
Axis expert_axis(const MeshShape& mesh);

// Throws Error{usage} if a node of the two-level dispatcher has more ranks than a host of the machine.
void check_nodes_of_machine(const TimeContext& c);

// Returns whether the run writes rows to the memory of other ranks, at least inside a node.
bool writes_to_windows(const TimeContext& c);
// Returns whether the engine sends the rows with the recipe's dispatcher. Then its messages are those that the dry run
// counted on the expert axis.
bool is_own(const TimeContext& c);
// Returns the ranks that exchange these messages: all of the axis; with two-level one rank of each node.
RankSpan span_of_messages(const TimeContext& c, const SentWork& sent);

// Returns the dispatcher that sends the rows.
PlanDispatcher dispatcher_of(const TimeContext& c);

// Rows may be sent to the experts in 8 bits (precision.dispatch). Their sums are sent back in precision.compute.
enum class RowDirection : int { to_experts, back };
struct RowsSent {
  double seconds = 0, wire_bytes = 0;
  double messages = 0;
  double outgoing_bytes = 0;  // to all other ranks; they are read from this rank's memory
  RowsSent& operator+=(const RowsSent& o);
};
// Returns the exchange of a layer's rows in one direction, with an assumed dispatcher or that of other software. It is
// zero if all experts are on this rank.
RowsSent rows_sent(const TimeContext& c, RowDirection direction);
// Return everything that an MoE layer sends in a pass; zero if the groups have counted it. The backward pass sends dy
// and dx, and in Moebius also x again, whatever is recomputed.
RowsSent forward_rows_sent(const TimeContext& c);
RowsSent backward_rows_sent(const TimeContext& c);

}  // namespace moebius
