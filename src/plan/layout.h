// The layout of a prediction: the spec that an engine would be built with, and the number of sets of saved tensors that
// each pipeline stage needs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "config/run_spec.h"
#include "engine/engine_spec.h"

namespace moebius {

// The checks of a run before its spec is made. A search checks the model once for all of its layouts, and a layout once
// for all of its memory choices.
enum class RunChecks { all, all_but_model, none };

// The maximum number of ranks of a plan.
inline constexpr int64_t kMaxRanks = int64_t{1} << 24;

// Returns the spec of the engine that trains `run` on `ranks` ranks, resolved. A recipe of a model alone
// counts as one sequence of the model's context, as in `moebius config`. Nothing is built.
// Throws Error{usage} with the equation that fails if no engine could be built.
EngineSpec planned_engine_spec(const RunSpec& run, int64_t ranks, RunChecks checks = RunChecks::all);

// The memory use of a pipeline's schedule: the saved tensors and buffers of a rank.
struct PipelineUse {
  std::vector<int64_t> num_saved;      // [virtual stage]: sets of saved tensors, each stage at its own peak
  std::vector<int64_t> num_in_flight;  // [virtual stage]: sets in use when the sum over all stages is at its maximum
  std::vector<std::vector<int64_t>> in_use;  // sets_in_use() (parallel/pipeline/placement.h)
  std::vector<bool> splits;                  // [virtual stage]: other passes may come between its two backward passes
  int64_t num_buffers = 0;                   // message buffers
};
// REQUIRES: spec is resolved, pp_rank is inside its mesh.
PipelineUse pipeline_use(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank);

// A cache of pipeline_use() by schedule and rank.
class PipelineUses {
 public:
  const PipelineUse& of(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank);

 private:
  std::map<std::array<int64_t, 6>, PipelineUse> uses_;
};

}  // namespace moebius
