// The prediction of a run: memory and time of a step on a machine, without running it.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "parallel/pipeline/simulate.h"
#include "plan/file_work.h"
#include "plan/layout.h"
#include "plan/rank_memory.h"
#include "plan/start_up.h"
#include "plan/work_time.h"

namespace moebius {

// The bytes that an axis carries in a step of one rank, and how long the rank waits for them.
struct AxisTime {
  double bytes = 0;  // that the rank sends
  double exposed_s = 0, hidden_s = 0;
  bool is_used() const { return bytes != 0 || exposed_s != 0 || hidden_s != 0; }
};

// The passes of a stage, of one micro-batch.
struct StageWork {
  PassTime forward, backward;     // forward: with the loss
  PassTime copies, stored_first;  // once a step (PartTime)
};

struct Prediction {
  MeshShape mesh;
  int64_t ranks = 1, num_micro_batches = 1;
  double tokens = 0;  // of a step, of all ranks
  double run_s = 0;   // of the tokens that are assumed, or of train.steps, and of its saves; 0: neither
  double step_s = 0, tokens_per_s_per_gpu = 0, model_tflops_per_gpu = 0;
  double mfu = 0;                         // of the machine's bf16 rate
  double bubble = 0;                      // share of the passes' time in which the slowest rank is idle
  std::map<std::string, double> phases;   // of the slowest rank, in seconds; their sum is step_s
  std::map<std::string, AxisTime> axes;   // of the slowest rank
  std::map<std::string, double> kernels;  // of the slowest rank's passes, in seconds, by class
  std::vector<StageWork> stages;          // [stage]: the actions of the schedule
  int64_t num_pp_ranks = 1;               // stage s is on rank s mod num_pp_ranks
  double transfer_s = 0;                  // of a message between stages
  double messages = 0;                    // that the slowest rank sends in a step, to ranks of its groups
  std::vector<RankMemory> memory;         // [pp_rank]
  size_t fullest = 0;                     // its index
  double memory_bytes = 0;                // that a rank has
  double host_bytes = 0;                  // of the rank that needs most of its host (RankMemory::host_bytes())
  double host_memory_bytes = 0;           // that a rank has of its host; of a CPU what its own memory has left
  bool is_gpu = true;
  int64_t threads = 0;         // of a rank, on a CPU
  double imbalance = 1;        // rows of the busiest rank's experts over the mean
  double imbalance_s = 0;      // of the passes, which the mean would not take
  StartUp start_up;            // over TCP
  FileWork files;              // of a simulated prediction
  SimulatedSchedule schedule;  // of at most `max_simulated` micro-batches
  const RankMemory& fullest_rank() const { return memory[fullest]; }
  bool fits() const { return static_cast<double>(fullest_rank().total()) <= memory_bytes; }
  bool host_fits() const { return host_bytes <= host_memory_bytes; }
};

struct PredictOptions {
  // Micro-batches that are simulated; more are added at the rate of the last ones.
  int64_t max_simulated = 64;
  bool simulate = true;      // false: the bubble of 1F1B's formula, for a search
  bool checks_model = true;  // false: run.model.check() has passed
  bool composes = true;      // without memory: parts are composed of simpler ones (plan/cost/composed_part.h)
  enum class Memory { none, fullest_stages, all } memory = Memory::all;  // of which ranks of the pipeline
};

// Returns the run as it would be on the machine: run.device is the machine's, and on a CPU run.threads = 0 becomes the
// number of its threads.
RunSpec run_on(const RunSpec& run, const PlanMachine& machine);

// Error{usage} if the machine lacks figures that the assumptions need.
void check_machine(const PlanMachine& machine, const Assumptions& assume);

// Error{usage} with the equation that fails where `ranks` ranks cannot hold the layout.
Prediction predict(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                   const Assumptions& assume, const PredictOptions& options = {});

}  // namespace moebius
