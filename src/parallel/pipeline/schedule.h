// Pipeline schedules as data: for each rank of the pp axis, the ordered list of its actions in a step. The executor
// (parallel/pipeline/pipeline.h) runs its rank's list as it is. The simulator (parallel/pipeline/simulate.h) checks the
// lists of all ranks.
//
// A StagePlacement says which rank holds a stage (config/stage_layout.h). One message per micro-batch and pass is sent
// between two stages: the hidden state forwards, its gradient backwards. The messages of one pass from one rank to
// another are a channel. Both its ends list them in the same order, so a transport may match messages by order alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/parallel_spec.h"
#include "config/stage_layout.h"

namespace moebius {

// backward_input gives the gradient of a stage's input, which the stage before waits for.
// backward_weight adds to the gradients of its weights; it neither needs nor sends a message, so it
// may run at any later time.
enum class Pass : int { forward, backward_input, backward_weight };
inline constexpr int64_t kNumPasses = 3;
// Returns the offset to the stage that receives the result of a pass: 1 forward, -1 backward.
inline int64_t onward(Pass pass) { return pass == Pass::forward ? 1 : -1; }

enum class Verb : int {
  receive,  // opens a buffer for the input of a pass and starts receiving into it; does not wait
  run,      // waits for what was received for this pass, then computes
  send,     // starts sending the result of a pass to the stage that needs it; does not wait
  wait      // waits until that send is complete; then its buffer may be reused
};

struct Action {
  Verb verb = Verb::run;
  Pass pass = Pass::forward;
  int64_t micro_batch = 0;
  int64_t stage = 0;
  bool operator==(const Action&) const = default;
};
std::string describe(const Action& action);  // "the receive for forward of micro-batch 3, stage 1"

struct PipelineShape {
  int64_t num_ranks = 1;          // P, the size of the pp axis
  int64_t num_virtual = 1;        // V, stages of one rank; more than one only when P > 1
  int64_t num_micro_batches = 1;  // M, of one step
  int64_t group = 0;              // G, micro-batches that pass one virtual stage before the next stage begins; 0: P
  bool backward = true;           // false: forward passes alone, for an evaluation

  StagePlacement placement() const { return {num_ranks, num_virtual}; }
  int64_t num_stages() const { return placement().num_stages(); }
  int64_t rank_of(int64_t stage) const { return placement().rank_of(stage); }
  int64_t virtual_of(int64_t stage) const { return placement().virtual_of(stage); }
  int64_t stage_of(int64_t pp_rank, int64_t v) const { return placement().stage_of(pp_rank, v); }
  int64_t group_size() const { return group == 0 ? num_ranks : group; }
  // Returns the number of a pass of a micro-batch on a stage, among all 3 M P V.
  size_t index(Pass pass, int64_t micro_batch, int64_t stage) const {
    return static_cast<size_t>((static_cast<int64_t>(pass) * num_micro_batches + micro_batch) * num_stages() + stage);
  }
  size_t num_passes() const { return static_cast<size_t>(kNumPasses * num_micro_batches * num_stages()); }
  // Returns whether a pass of a stage receives a message, and whether it sends one.
  bool has_input(Pass pass, int64_t stage) const {
    return pass != Pass::backward_weight && stage != (pass == Pass::forward ? 0 : num_stages() - 1);
  }
  bool has_output(Pass pass, int64_t stage) const {
    return pass != Pass::backward_weight && stage != (pass == Pass::forward ? num_stages() - 1 : 0);
  }

  // Throws Error{usage} with the equation that fails: P, V, M >= 1; V = 1 or P > 1.
  void check() const;
  bool operator==(const PipelineShape&) const = default;
};

// The actions of every rank. They also say where transfers start. In each pass, receives are
// opened 1 input ahead of the pass that runs (interleaved: 1 + G - P inputs). So transfers can
// overlap with compute. The results of the last rank arrive at rank 0 G - P turns early, so it
// never waits for a buffer. At most two results of a pass are in flight from a rank: one is sent
// while the next is computed.
struct Schedule {
  PipelineShape shape;
  std::vector<std::vector<Action>> actions;  // [pp_rank]
};

// Returns whether other passes of a rank may come between its two backward passes of a micro-batch.
inline bool splits_backward(PipelineSchedule schedule, int64_t pp_rank) {
  return schedule == PipelineSchedule::zb_h1 && pp_rank > 0;
}

// Returns the number of warm-up forwards of rank r, at most V M:
//   V = 1   P - r - 1
//   V > 1   2 (P - r - 1) + (V - 1) G
int64_t num_warmup_forwards(const PipelineShape& shape, int64_t pp_rank);

// 1F1B (PipeDream-Flush, arXiv 2006.09503) for V = 1, interleaved 1F1B (arXiv 2104.04473)
// for V > 1: a rank's warm-up forwards, then alternately one forward and one backward, then the
// remaining backwards. A backward is backward_input followed at once by backward_weight.
// In each pass, every stage takes the micro-batches in the order 0 .. M - 1, so gradients are
// summed in the same order for any P and V.
// Throws Error{usage} with the equation that fails: the shape's, and for V > 1, P <= G <= M and M
// mod G = 0 or >= P, since a shorter last group would wait for its own results every time.
// REQUIRES: shape.backward.
Schedule schedule_1f1b(const PipelineShape& shape);

// Returns ZB-H1 (zero bubble pipeline parallelism, arXiv 2401.10241, section 2.2). It is 1F1B with delayed weight
// gradients: rank r runs the backward_weight of a micro-batch after the backward_input of the r-th later one. So
// gradients reach earlier stages sooner, and later ranks have work while the pipeline drains. Let F, B and W be the
// times of the three passes, the same on all ranks. With W <= F and P <= M, a step takes
// M (F + B + W) + (P - 1) (F + B - W); 1F1B takes (M + P - 1) (F + B + W). A rank holds the saved tensors of at most
// min(P, M) micro-batches, as rank 0 does in 1F1B. Gradients are summed in the order of 1F1B.
// Throws Error{usage} unless V = 1. REQUIRES: shape.backward.
Schedule schedule_zb_h1(const PipelineShape& shape);

// Returns the sequential schedule: each micro-batch passes forward and backward through all stages before the next one
// starts. Evaluation runs it with forwards alone, and all other schedules must give its results. It works
// for any shape. step: the schedule of a training step, which decides whether the two backward passes are separate.
Schedule sequential_schedule(const PipelineShape& shape, PipelineSchedule step = PipelineSchedule::one_f_one_b);

// Returns the schedule with the wait for each send moved directly after the send.
Schedule without_overlap(const Schedule& schedule);

}  // namespace moebius
