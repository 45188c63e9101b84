#include "plan/memory/run_memory.h"

#include <algorithm>

namespace moebius {
namespace {

RunSpec without_choice(RunSpec run) {
  run.memory.automatic = false;
  run.memory.fit_bytes = 0;
  return run;
}

// Ranks that share experts may find at the start that they can access each other's memory, at least in each node. Then
// the rates of their links decide.
std::vector<EngineSpec> specs_of_dispatchers(RunSpec run, int64_t ranks, const PlanMachine& machine, RunChecks checks) {
  std::vector<EngineSpec> specs{planned_engine_spec_on(run, ranks, machine, checks)};
  if (run.parallel.dispatcher != DispatcherKind::automatic || run.parallel.ep * run.parallel.etp == 1) return specs;
  std::vector<DispatcherKind> others{DispatcherKind::direct};
  if (has_nodes(run.parallel.ep, run.parallel.etp, run.parallel.ranks_per_node))
    others = {DispatcherKind::direct, DispatcherKind::two_level, DispatcherKind::allgather, DispatcherKind::alltoall};
  for (const DispatcherKind kind : others) {
    run.parallel.dispatcher = kind;
    try {
      specs.push_back(planned_engine_spec_on(run, ranks, machine, checks));
    } catch (const Error& e) {
      if (e.kind() != ErrorKind::usage) throw;  // this layout is refused, so no run uses it
    }
  }
  return specs;
}

std::vector<EngineSpec> specs_of(const RunSpec& run, int64_t ranks, const PlanMachine& machine, bool others_too,
                                 RunChecks checks) {
  std::vector<EngineSpec> specs = specs_of_dispatchers(run, ranks, machine, checks);
  const size_t n = others_too ? specs.size() : 0;
  for (size_t i = 0; i < n; ++i) specs.push_back(on_other_gpu(specs[i]));
  return specs;
}

}  // namespace

RunMemory::RunMemory(PartLibrary& library, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                     bool others_too, RunChecks checks)
    : library_(library),
      specs_(specs_of(without_choice(run), ranks, machine, others_too, checks)),
      layout_(stages_of(specs_[0])) {
  for (int64_t r = 0; r < layout_.num_ranks; ++r)
    uses_.push_back(pipeline_use(specs_[0].pipeline, specs_[0].mesh.pp, r));
}

int64_t RunMemory::bytes(int64_t pp_rank, const RecomputeSpec& recompute, std::optional<double> buffer) const {
  int64_t most = 0;
  for (EngineSpec spec : specs_) {
    spec.recompute = recompute;
    if (buffer && spec.optimizer) spec.optimizer->offload_buffer = buffer;
    LayoutParts parts(library_, spec);
    most = std::max(most, rank_memory(parts, layout_, use(pp_rank), pp_rank).total());
  }
  return most;
}

}  // namespace moebius
