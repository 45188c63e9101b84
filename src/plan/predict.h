// The prediction of a run: memory and time of a step on a machine, without running it.
#pragma once

#include <array>
#include <map>
#include <string>
#include <vector>

#include "config/dispatcher_choice.h"
#include "parallel/pipeline/simulate.h"
#include "plan/cost/stage_work.h"
#include "plan/cost/start_up.h"
#include "plan/file_work.h"
#include "plan/layout.h"
#include "plan/memory/rank_memory.h"
#include "plan/search/part_times.h"
#include "plan/work_time.h"

namespace moebius {

// The communication of one rank on an axis of the mesh in a step.
struct AxisTime {
  double bytes = 0;  // bytes that the rank sends
  double exposed_s = 0, hidden_s = 0;
  bool is_used() const { return bytes != 0 || exposed_s != 0 || hidden_s != 0; }
};

struct Prediction {
  MeshShape mesh;
  int64_t ranks = 1, num_micro_batches = 1;
  double tokens = 0;  // tokens of a step, over all ranks
  double run_s = 0;   // the whole run by --assume tokens or train.steps, with its saves; 0: neither is given
  double step_s = 0, tokens_per_s_per_gpu = 0, model_tflops_per_gpu = 0;
  double mfu = 0;                        // model FLOPs relative to the machine's bf16 rate
  double bubble = 0;                     // share of the passes' time in which the slowest rank is idle
  std::map<std::string, double> phases;  // seconds of the slowest rank by phase; their sum is step_s
  std::map<std::string, AxisTime> axes;  // communication of the slowest rank by axis
  // The part of `axes` outside the passes: gradients, weights, and what an update needs.
  std::map<std::string, AxisTime> axes_beside_passes;
  std::map<std::string, double> kernels;  // seconds of the slowest rank's passes by kernel class
  StageWorks stages;                      // [virtual stage]: the times of its actions in the schedule
  int64_t num_pp_ranks = 1;               // stage s is on rank s mod num_pp_ranks
  double transfer_s = 0;                  // seconds of a message between stages
  double message_bytes = 0;               // bytes of such a message
  double launch_s = 0;                    // seconds of the slowest rank's passes between kernels
  double states_link_s = 0;               // seconds of the phase "host link" in which states on the host move
  double messages = 0;                    // messages that the slowest rank sends in a step
  std::vector<RankMemory> memory;         // [pp_rank]
  size_t fullest = 0;                     // index into `memory` of the rank that needs the most
  double memory_bytes = 0;                // device memory that a rank has
  double host_bytes = 0;                  // the largest RankMemory::host_bytes() of any rank
  double host_memory_bytes = 0;           // host memory that a rank has; on a CPU, what the plan leaves of its memory
  bool is_gpu = true;
  bool assumes_cudnn = false;  // for attention
  int64_t threads = 0;         // threads of a rank, on a CPU
  double imbalance = 1;        // rows of the busiest rank's experts over the mean
  double imbalance_s = 0;      // seconds that the passes take longer than with balanced experts
  StartUp start_up;            // the rendezvous over TCP
  FileWork files;              // only with PredictOptions::simulate
  SimulatedSchedule schedule;  // the simulated micro-batches, at most PredictOptions::max_simulated
  const RankMemory& fullest_rank() const { return memory[fullest]; }
  bool fits() const { return static_cast<double>(fullest_rank().total()) <= memory_bytes; }
  bool host_fits() const { return host_bytes <= host_memory_bytes; }
};

struct PredictOptions {
  // The maximum number of micro-batches to simulate; each further one adds the slowest rank's time of one.
  int64_t max_simulated = 64;
  bool simulate = true;  // false: the bubble follows from the formula of the schedule, which is faster, for a search
  RunChecks checks = RunChecks::all;  // those that the caller has not made
  bool composes = true;  // with Memory::none, part times are composed of simpler ones (plan/cost/composed_part.h)
  enum class Memory { none, fullest_stages, all } memory = Memory::all;  // the pipeline ranks whose memory is predicted
  PartTimes* times = nullptr;  // the times of parts that other predictions of a search share; null: none
};

// Returns the run as it would be on the machine: run.device is the machine's, on a CPU run.threads = 0 becomes the
// number of its threads, and dispatchers are compared by its rates. Moebius has products in 8 bits only where its
// kernels for Hopper run.
RunSpec run_on(RunSpec run, const PlanMachine& machine, PlanSystem system = PlanSystem::moebius);
// Returns the dispatcher that the engine has in such a run (PlanMachine::ranks_of_windows).
DispatcherChoice dispatcher_on(const RunSpec& run, int64_t ranks, const PlanMachine& machine);
// The same as run_on(), and for Moebius parallel.dispatcher = "auto" becomes that one.
RunSpec run_of_ranks_on(RunSpec run, int64_t ranks, const PlanMachine& machine,
                        PlanSystem system = PlanSystem::moebius);
// Throws the engine's Error{usage} if Moebius cannot run on the machine's GPU: precision.recipe = "fp8_block",
// optimizer.fuse_grad, or batch_split in bf16 on a GPU whose given capability is not Hopper's.
void check_kernels(const RunSpec& run, const PlanMachine& machine, PlanSystem system);
// The same for a search, which chooses the layout, and the recipe unless it keeps the run's.
void check_kernels_of_layouts(RunSpec run, const PlanMachine& machine, PlanSystem system, bool keeps_recipe);
// Returns planned_engine_spec() with the memory of the kernels that the machine's GPU runs.
EngineSpec planned_engine_spec_on(const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                                  RunChecks checks = RunChecks::all);

// Throws Error{usage} if the machine file lacks figures that the assumptions need.
void check_machine(const PlanMachine& machine, const Assumptions& assume);

// Predicts a step. Throws Error{usage} with the equation that fails if the layout is impossible on `ranks` ranks.
Prediction predict(PartLibrary& parts, RunSpec run, int64_t ranks, const PlanMachine& machine,
                   const Assumptions& assume, const PredictOptions& options = {});

}  // namespace moebius
