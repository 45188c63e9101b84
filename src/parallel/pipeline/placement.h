// The memory that the actions of a rank's list use, worked out before the first step, as a value: which buffer holds the
// message of an action, which set of saved tensors a pass works on, and whether the two backward passes of a stage are
// ever apart. Numbers are the lowest that are free, so that as many are needed as the list holds at a time.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

struct PlacedAction {
  Action action;
  // The result of a pass replaces its input: a buffer goes from its receive through the run and the send to the wait. A
  // pass without a message to take has one from its run on, one without a message to leave until its run. A weight pass
  // by itself has none: -1.
  int64_t buffer = 0;
  int64_t saved_set = 0;  // of a run: of its virtual stage
  // Only for the run of a backward_input. True: the run is both backward passes, since the list's
  // next action is its backward_weight. They run as one, layer after layer, so that less memory is
  // held between them.
  bool with_weight = false;
};

struct RankProgram {
  PipelineShape shape;
  std::vector<PlacedAction> actions;  // a backward_weight that is part of the action before it is not among them
  int64_t num_buffers = 0;
  // [virtual stage]: RankSimulation::peak_of_stage of every list whose last passes come in the order of its forwards.
  std::vector<int64_t> num_saved_sets;
  std::vector<bool> splits_backward;  // [virtual stage]: some backward_weight is by itself
};

// REQUIRES: check_actions(schedule) passes.
RankProgram place_actions(const Schedule& schedule, int64_t pp_rank);

}  // namespace moebius
