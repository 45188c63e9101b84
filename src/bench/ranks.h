// Times whole training steps on several ranks, and single collectives.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "config/run_spec.h"
#include "core/trace.h"
#include "engine/engine.h"
#include "train/rank_report.h"

namespace moebius {

struct RanksBench {
  int64_t ranks = 1, steps = 0, tokens = 0;  // timed steps; tokens of one step, of all ranks
  double median_s = 0;                       // time of a step, on the slowest rank of each
  double tokens_per_s = 0;                   // tokens of all ranks
  double first_loss = 0, last_loss = 0;
  int64_t planned_bytes = 0, peak_bytes = 0;  // memory of rank 0, of its GPU if it has one
  std::string links;                          // the links between GPUs; empty on CPUs
  std::string dispatcher;                     // how tokens reach experts on other ranks
  std::string fallback_kernels;               // those of rank 0, as in StepBench
  RanksReport of_last_step;                   // bytes sent on each axis, and the time that compute did not hide
  std::map<std::string, OpTotal> ops;         // of the timed steps of rank 0; with profile
};

// Returns the number of steps before the timed ones. They touch memory and load kernels; on a GPU two are eager and one
// is captured.
int64_t warm_up_steps(DeviceKind device);
struct RanksBenchSpec {
  int64_t steps = 3;
  bool profile = false;  // times each op; steps on a GPU are then eager
};
// Runs on all ranks of the world together. The report is that of rank 0.
RanksBench bench_step_of_ranks(const RunSpec& run, const RanksBenchSpec& bench, Transport& world);

// One collective of all ranks in f32, repeated. What is sent is that of rank 0 in one call.
struct CollectiveLine {
  std::string name;
  int64_t bytes = 0;  // size of the larger tensor
  double median_ms = 0;
  int64_t sent_messages = 0;  // on CPUs only
  int64_t sent_bytes = 0;
  double formula_bytes = 0;  // sent_bytes by comm/group_cost.h
  double sent_gbytes_per_s() const { return static_cast<double>(sent_bytes) / median_ms / 1e6; }
};
struct CollectivesBenchSpec {
  // The size of the larger tensor. On CPUs a size is left out if the buffers of all ranks would need more than half of
  // the memory that is available; the first two are always timed.
  std::vector<int64_t> sizes{int64_t{1} << 20, int64_t{16} << 20, int64_t{128} << 20};
  double budget_s = 2;  // of a line, which takes at least five calls
};
std::vector<CollectiveLine> bench_collectives(DeviceKind device, Transport& world,
                                              const CollectivesBenchSpec& spec = {});

}  // namespace moebius
