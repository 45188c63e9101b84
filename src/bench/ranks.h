// Whole training steps on several ranks, timed; and the collectives by themselves.
#pragma once

#include <string>
#include <vector>

#include "config/run_spec.h"
#include "engine/engine.h"
#include "train/rank_report.h"

namespace moebius {

struct RanksBench {
  int64_t ranks = 1, steps = 0, tokens = 0;  // timed; tokens of one step, of all ranks
  double median_s = 0;                       // of a step, on the slowest rank of each
  double tokens_per_s = 0;                   // of all ranks
  double first_loss = 0, last_loss = 0;
  int64_t planned_bytes = 0, peak_bytes = 0;  // of rank 0
  std::string links;                          // how GPUs exchange; empty on CPUs
  std::string fallback_kernels;               // of rank 0, as StepBench has them
  RanksReport of_last_step;                   // what each axis sent, and what compute did not hide of it
};

// Steps before the timed ones: first touch of memory and kernels, and on a GPU two eager ones and one that is captured.
int64_t warm_up_steps(DeviceKind device);
// All ranks of the world together; the report is rank 0's.
RanksBench bench_step_of_ranks(const RunSpec& run, int64_t steps, Transport& world);

// One collective of all ranks in f32, again and again.
struct CollectiveLine {
  std::string name;
  int64_t bytes = 0;  // of its larger tensor
  double median_ms = 0;
  double sent_gbytes_per_s = 0;  // that left a rank
};
std::vector<CollectiveLine> bench_collectives(DeviceKind device, Transport& world);

}  // namespace moebius
