// Makes the list of a rank's actions from the order of its passes. The generators of schedules give that order
// (schedule_1f1b.cc, schedule_sequential.cc).
#pragma once

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moebius {

// A place in that order: a forward pass, or both backward passes, named by the first of them.
struct Turn {
  Pass pass = Pass::forward;
  int64_t micro_batch = 0, stage = 0;
};

// Returns the passes with a rank's receives, sends and waits between them. Each backward_weight follows its
// backward_input at once. ahead: the number of later inputs of each pass for which a buffer is open, beyond the input
// that the running pass uses.
std::vector<Action> actions_in_order(const PipelineShape& shape, const std::vector<Turn>& order, int64_t ahead);

}  // namespace moebius
