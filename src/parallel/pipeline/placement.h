// Which memory the actions of a rank's list use, worked out before the first step, as a value: which buffer holds the
// message of an action, and which set of saved tensors a pass works on. Numbers are the lowest that are free, so that
// as many are needed as the list holds at a time.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

struct PlacedAction {
  Action action;
  // What enters a pass is replaced by what leaves it: a buffer goes from its receive through the run and the send to
  // the wait. A pass without a message to take has one from its run on, one without a message to leave until its run.
  int64_t buffer = 0;
  int64_t saved_set = 0;  // of a run: of its virtual stage
};

struct RankProgram {
  PipelineShape shape;
  std::vector<PlacedAction> actions;
  int64_t num_buffers = 0;
  // [virtual stage]: RankSimulation::peak_of_stage of every list whose backwards come in the order of its forwards.
  std::vector<int64_t> num_saved_sets;
};

// REQUIRES: check_actions(schedule) passes.
RankProgram place_actions(const Schedule& schedule, int64_t pp_rank);

}  // namespace moebius
