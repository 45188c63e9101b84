// Makes the list of a rank's actions from the order of its passes. The generators of schedules give that order
// (schedule_1f1b.cc, schedule_zb_h1.cc, schedule_sequential.cc).
#pragma once

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moebius {

// One pass in the order of a rank.
struct Turn {
  Pass pass = Pass::forward;
  int64_t micro_batch = 0, stage = 0;
  bool with_weight = false;  // only with backward_input: its backward_weight follows at once, before the result is sent
};

// Returns the passes with a rank's receives, sends and waits between them. early_inputs: the number of later inputs of
// each pass for which a buffer is open, beyond the input that the running pass uses.
std::vector<Action> actions_in_order(const PipelineShape& shape, const std::vector<Turn>& order, int64_t early_inputs);

// These return the action list of one rank (parallel/pipeline/schedule.h), and throw the errors of the whole schedule.
std::vector<Action> actions_of_1f1b(const PipelineShape& shape, int64_t pp_rank);
std::vector<Action> actions_of_zb_h1(const PipelineShape& shape, int64_t pp_rank);

}  // namespace moebius
