#include "plan/layout.h"

#include <algorithm>
#include <optional>

#include "config/run_check.h"
#include "model/device_support.h"
#include "model/gpu_products.h"
#include "parallel/pipeline/simulate.h"
#include "parallel/pipeline/step_schedule.h"

namespace moebius {
namespace {

// The number of simulated micro-batches is at most this many times the pipeline's length, since more need
// no more memory.
constexpr int64_t kRoundsOfMemory = 4;

int64_t micro_batches_of_memory(const PipelineSpec& spec, int64_t num_ranks) {
  const int64_t most = kRoundsOfMemory * num_ranks;
  return spec.num_micro_batches > most ? most + spec.num_micro_batches % num_ranks : spec.num_micro_batches;
}

RankProgram placed(const Schedule& schedule, int64_t pp_rank) { return place_actions(schedule, pp_rank); }

// Returns the sets in use of each virtual stage at the first time when their sum is largest.
std::vector<int64_t> sets_at_peak(const RankProgram& program) {
  std::vector<int64_t> now(static_cast<size_t>(program.shape.num_virtual)), at_peak = now;
  int64_t all = 0, most = 0;
  for (const PlacedAction& placed : program.actions) {
    const Action& a = placed.action;
    if (a.verb != Verb::run) continue;
    const auto v = static_cast<size_t>(program.shape.virtual_of(a.stage));
    if (a.pass == Pass::forward) {
      ++now[v];
      if (++all > most) most = all, at_peak = now;
    } else if (placed.with_weight || a.pass == Pass::backward_weight) {
      --now[v], --all;
    }
  }
  return at_peak;
}

}  // namespace

EngineSpec planned_engine_spec(const RunSpec& asked, int64_t ranks, RunChecks checks) {
  MOEBIUS_CHECK(usage, ranks >= 1 && ranks <= kMaxRanks, "plan: expected 1 to {} ranks; got {}", kMaxRanks, ranks);
  std::optional<RunSpec> completed;  // a search's runs are whole, and a copy takes as long as a check
  if (asked.train.micro_batch == 0 || asked.train.seq_len == 0) {
    completed = asked;
    if (asked.train.micro_batch == 0) completed->train.micro_batch = 1;
    if (asked.train.seq_len == 0) completed->train.seq_len = asked.model.max_position_embeddings;
  }
  const RunSpec& run = completed ? *completed : asked;
  if (checks == RunChecks::all) run.check(ranks);
  if (checks == RunChecks::all_but_model) check_except_model(run, ranks);
  const MeshShape mesh = mesh_shape(run.parallel, ranks);
  mesh.check();
  EngineSpec spec = training_engine_spec(run, mesh);
  spec.device = DeviceKind::null;
  check_device(spec.model, spec.target, {.batch = spec.shape.batch, .tp = mesh.tp});
  if (checks == RunChecks::all) check_quantised_products(spec.model, spec.precision, spec.lora, spec.target);
  return resolved(std::move(spec));
}

PipelineUse pipeline_use(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank) {
  PipelineShape shape{.num_ranks = num_ranks, .num_virtual = spec.num_virtual};
  const RankProgram one = placed(sequential_schedule(shape, spec.schedule), pp_rank);
  shape.backward = false;
  const RankProgram forward = placed(sequential_schedule(shape), pp_rank);
  shape.backward = true;
  shape.num_micro_batches = spec.num_micro_batches;
  shape.check();  // before the number of micro-batches is reduced
  shape.num_micro_batches = micro_batches_of_memory(spec, num_ranks);
  const Schedule step = step_schedule_of(spec.schedule, shape, pp_rank);
  const RankProgram program = placed(spec.overlap ? step : without_overlap(step), pp_rank);
  return {.num_saved = program.num_saved_sets,
          .num_in_flight = sets_at_peak(program),
          .in_use = sets_in_use(program),
          .splits = program.splits_backward,
          .num_buffers = std::max({program.num_buffers, one.num_buffers, forward.num_buffers})};
}

const PipelineUse& PipelineUses::of(const PipelineSpec& spec, int64_t num_ranks, int64_t pp_rank) {
  const std::array<int64_t, 6> key{num_ranks,        pp_rank,
                                   spec.num_virtual, micro_batches_of_memory(spec, num_ranks),
                                   spec.overlap,     static_cast<int64_t>(spec.schedule)};
  const auto found = uses_.find(key);
  return found != uses_.end() ? found->second
                              : uses_.emplace(key, pipeline_use(spec, num_ranks, pp_rank)).first->second;
}

}  // namespace moebius
