// The simulator of pipeline schedules. It proves that a schedule is complete and free of deadlock.
// It also computes the schedule's timeline, bubble and peaks, for the times of a model, or with all
// times equal for comparison with theory.
//
// It assumes the following machine. A rank executes its list in order. A message moves when its
// receive is open and its send has started (no transport buffers anything). It takes `transfer`,
// and messages of one channel move one after another.
#pragma once

#include <string>
#include <vector>

#include "parallel/pipeline/schedule.h"

namespace moebius {

// Times, in any unit that is the same for all.
struct StageTime {
  double forward = 1, backward_input = 0.5, backward_weight = 0.5;
  double of(Pass pass) const;
};
struct PipelineTimes {
  std::vector<StageTime> stages;  // [stage]
  double transfer = 0;            // time of one message
};
PipelineTimes equal_times(const PipelineShape& shape, const StageTime& stage = {}, double transfer = 0);

struct RankSimulation {
  struct Run {
    Action action;
    double begin = 0, end = 0;
  };
  std::vector<Run> runs;  // in the order in which they ran
  double busy = 0;        // the sum of their times
  // Peaks of the memory that the rank needs; these follow from its list alone, whatever the times.
  // The largest number of (micro-batch, stage) pairs between the start of their forward and the end of their last pass.
  int64_t peak_in_flight = 0;
  std::vector<int64_t> peak_of_stage;  // the same of each virtual stage alone: the stages' peaks need not coincide
  int64_t peak_receives = 0;           // inputs opened before their pass runs
  int64_t peak_sends = 0;              // results that are sent and not yet waited for
};

struct SimulatedSchedule {
  PipelineShape shape;
  std::vector<RankSimulation> ranks;  // [pp_rank]
  double duration = 0;                // until the last rank has done its list

  // The share of the ranks' time that they do not compute: 1 - sum of busy / (P * duration). For
  // equal times of all stages and free transfers 1F1B has (P - 1) / (V M + P - 1): each rank
  // computes V M forwards and backwards, and the pipeline takes P - 1 of both to fill and to drain.
  double bubble() const;
};

// Throws Error{usage} naming rank and action unless all of this holds. Each rank does every
// micro-batch of each of its stages once per pass (the forward alone where the shape says so),
// in the order 0 .. M - 1, and the passes of a micro-batch in their order. Each input is
// received before its pass, and each result sent and waited for after it. Both ends of every
// channel list its messages in the same order.
void check_actions(const Schedule& schedule);

// Checks the above, then computes the timeline. Throws Error{usage} when ranks wait for one
// another, naming the ranks of the cycle and what each waits for. Also when times has not
// one entry per stage, or a negative one.
SimulatedSchedule simulate(const Schedule& schedule, const PipelineTimes& times);

// Returns a text with one line per rank and one column per unit of time: a forward is the letter of its virtual stage
// (a is the first) and its micro-batch, a backward the same in capitals, -- is its continuation, .
// is idle.
// A weight pass that follows its input pass at once is part of that backward; a later one is
// shown as A0w. REQUIRES: unit > 0.
std::string picture(const SimulatedSchedule& simulated, double unit = 1);

}  // namespace moebius
