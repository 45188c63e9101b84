// The memory that the actions of a rank's list use, as a value that is worked out before the first
// step. It says which buffer holds the message of an action, and which set of saved tensors a pass
// works on. It also says whether the two backward passes of a stage are ever separate. Each number
// is the lowest free one, so the list needs no more numbers than it holds at a time.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

struct PlacedAction {
  Action action;
  // The result of a pass replaces its input: a buffer is in use from its receive through the run
  // and the send to the wait. A pass that receives no message uses one from its run on. A pass that
  // sends no message uses one until its run. A weight pass by itself has no buffer: -1.
  int64_t buffer = 0;
  int64_t saved_set = 0;  // for a run: among the sets of its virtual stage
  // Only for the run of a backward_input. True: the run is both backward passes, since the
  // list's next action is its backward_weight. They run as one, layer after layer, so that
  // less memory is held between them.
  bool with_weight = false;
  // Only for the run of a forward. True: the rank's next pass is both backward passes of this micro-batch and stage.
  bool backward_follows = false;
};

struct RankProgram {
  PipelineShape shape;
  std::vector<PlacedAction> actions;  // a backward_weight that is part of the action before it is not among them
  int64_t num_buffers = 0;
  // [virtual stage]: RankSimulation::peak_of_stage of every list whose last passes
  // come in the order of its forwards.
  std::vector<int64_t> num_saved_sets;
  std::vector<bool> splits_backward;  // [virtual stage]: some backward_weight is by itself
};

// The sets of saved tensors that each virtual stage of the list has in use after a forward, without repeats:
// [moment][virtual stage].
std::vector<std::vector<int64_t>> sets_in_use(const RankProgram& program);
// The largest sum over the virtual stages of sets times weight_of_stage, of all moments.
int64_t most_in_use(const std::vector<std::vector<int64_t>>& sets_in_use, const std::vector<int64_t>& weight_of_stage);

// REQUIRES: check_actions(schedule) passes.
RankProgram place_actions(const Schedule& schedule, int64_t pp_rank);

}  // namespace moebius
