// The files of DispatchedExperts share this: groups of rows for operands, and ops with scratch from the step stack.
#pragma once

#include "model/moe/dispatched_experts.h"

namespace moebius {

// The groups of rows sorted by expert, for an operand read in place and for one that is transposed. Rows that are read
// by token are all present; otherwise the last offset gives their number. own_TD: the rows that this rank sends, also
// those that no expert gets. Their largest magnitude is that of the operand, whatever rows arrive here.
inline RowGroups in_place(const Rows& rows, const Tensor& own_TD = {}) {
  return {rows.token_R.empty() ? rows.offsets_e1 : Tensor{}, {}, own_TD};
}
inline RowGroups by_expert(const Rows& rows) { return {rows.offsets_e1, {}}; }
inline RowGroups gathered(const Rows& rows) { return {rows.offsets_e1, rows.token_R}; }

// Runs an expert op with scratch from the step stack for the duration of the call.
template <class Op, class Run>
void run_expert_op(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

}  // namespace moebius
