// The memory of each pipeline rank of a run, for all dispatchers that the run may choose and all kinds of GPUs.
#pragma once

#include <optional>
#include <vector>

#include "plan/memory/rank_memory.h"
#include "plan/predict.h"

namespace moebius {

class RunMemory {
 public:
  // others_too: ranks may also be on GPUs that are not Hopper's. checks: those that the caller has not made.
  RunMemory(PartLibrary& library, const RunSpec& run, int64_t ranks, const PlanMachine& machine, bool others_too,
            RunChecks checks = RunChecks::all);

  PartLibrary& library() const { return library_; }
  const EngineSpec& spec() const { return specs_[0]; }
  const StageLayout& layout() const { return layout_; }
  const PipelineUse& use(int64_t pp_rank) const { return uses_[static_cast<size_t>(pp_rank)]; }
  int64_t num_pp_ranks() const { return layout_.num_ranks; }

  // Returns the most device memory that the rank needs. buffer: optimizer.offload_buffer; none: the run's.
  int64_t bytes(int64_t pp_rank, const RecomputeSpec& recompute, std::optional<double> buffer = {}) const;

 private:
  PartLibrary& library_;
  std::vector<EngineSpec> specs_;  // one for each dispatcher, and each kind of GPU
  StageLayout layout_;
  std::vector<PipelineUse> uses_;  // [pp_rank]
};

}  // namespace moebius
