// The list of a rank's actions, from the order of its passes alone. Generators of schedules say the
// order (schedule_1f1b.cc, schedule_sequential.cc).
#pragma once

#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moebius {

// A forward; or a backward, named by its first pass.
struct Turn {
  Pass pass = Pass::forward;
  int64_t micro_batch = 0, stage = 0;
};

// Puts a rank's receives, sends and waits between its passes, and the weight pass of a backward
// right after its input pass. ahead: of the input that is used, so many of its pass are open.
std::vector<Action> actions_in_order(const PipelineShape& shape, const std::vector<Turn>& order, int64_t ahead);

}  // namespace moebius
