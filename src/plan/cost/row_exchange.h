// The exchange of rows between a layer's tokens and their experts on other ranks: the bytes that travel, and
// their time. The groups of the dry run have counted the messages of the engine's all-gather, all-to-all and two-level dispatchers.
// Counted here is what is written to the memory of other ranks, and what dispatchers of other software send.
#pragma once

#include "plan/work_time.h"

namespace moebius {

// Returns whether the axis is that of the ranks that share experts.
bool carries_rows(Axis axis);
// That axis of a mesh.
Axis axis_of_rows(const MeshShape& mesh);

// Error{usage} where the two-level dispatcher has nodes of more ranks than share a host of the machine.
void check_nodes_of_machine(const TimeContext& c);

// Returns whether the messages that the engine's groups counted on that axis travel.
bool sends_own_messages(const TimeContext& c);
// The ranks between which messages travel: all of the axis, or those of two-level one of each node.
RankSpan span_of_messages(const TimeContext& c, const SentWork& sent);

// The dispatcher whose rows travel.
PlanDispatcher dispatcher_of(const TimeContext& c);

// To the experts rows may travel in 8 bits (precision.dispatch); their sums return in precision.compute.
enum class RowsWay : int { to_experts, back };
struct RowsSent {
  double seconds = 0, wire_bytes = 0;
  double messages = 0;
  double left_bytes = 0;  // to ranks in and out of the domain: read from this rank's memory
  RowsSent& operator+=(const RowsSent& o);
};
// One way of a layer's tokens, with an assumed dispatcher or one of other software. Zeros where all experts are here.
RowsSent rows_sent(const TimeContext& c, RowsWay way);
// The same of all that an MoE layer sends in a pass. Zeros where the groups counted it. Backward are the ways of dy and
// dx, and Moebius dispatches x once more, whatever is recomputed.
RowsSent rows_of_forward(const TimeContext& c);
RowsSent rows_of_backward(const TimeContext& c);

}  // namespace moebius
