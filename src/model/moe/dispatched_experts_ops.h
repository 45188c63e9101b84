// The files of DispatchedExperts share this call of an expert op.
#pragma once

#include "model/moe/dispatched_experts.h"

namespace moebius {

// Runs an expert op with scratch from the step stack for the duration of the call.
template <class Op, class Run>
void run_expert_op(Step& step, Op op, Run run) {
  StackScope scope(step.stack);
  op.scratch = step.alloc_bytes(Op::scratch_bytes(op, step.stream));
  run(step.stream, op);
}

}  // namespace moebius
