// The assignment of memory to the actions of a rank's list, computed before the first step: the buffer of each message,
// and the set of saved tensors of each pass. It also finds the stages whose two backward passes are ever separate. Each
// assignment takes the lowest free number, so the numbers used are the maximum in use at a time.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

struct PlacedAction {
  Action action;
  // A pass replaces its input by its result. So a buffer is in use from the receive (or the run, if nothing is
  // received) to the wait for the send (or the run, if nothing is sent). A backward_weight by itself has no buffer: -1.
  int64_t buffer = 0;
  int64_t saved_set = 0;  // for a run: the index of the set of its virtual stage
  // For the run of a backward_input. True: the next action in the list was its backward_weight, so both passes run as
  // one, layer by layer, which needs less memory between them.
  bool with_weight = false;
  // For the run of a forward. True: the rank's next pass is the backward of this micro-batch and stage.
  bool backward_follows = false;
};

struct RankProgram {
  PipelineShape shape;
  std::vector<PlacedAction> actions;  // without each backward_weight that runs with its backward_input
  int64_t num_buffers = 0;
  // [virtual stage]: RankSimulation::peak_of_stage of every list whose last passes
  // come in the order of its forwards.
  std::vector<int64_t> num_saved_sets;
  std::vector<bool> splits_backward;  // [virtual stage]: some backward_weight is by itself
};

// Returns the number of sets of saved tensors in use after a forward, [moment][virtual stage], without repeats.
std::vector<std::vector<int64_t>> sets_in_use(const RankProgram& program);
// Returns the maximum over all moments of (the sum over virtual stages of sets times weight_of_stage).
int64_t most_in_use(const std::vector<std::vector<int64_t>>& sets_in_use, const std::vector<int64_t>& weight_of_stage);

// REQUIRES: check_actions(schedule) passes.
RankProgram place_actions(const Schedule& schedule, int64_t pp_rank);

}  // namespace moebius
