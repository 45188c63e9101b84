#include "parallel/pipeline/step_schedule.h"

#include "core/error.h"
#include "parallel/pipeline/action_list.h"

namespace moebius {
namespace {

std::vector<Action> actions_of(PipelineSchedule kind, const PipelineShape& shape, int64_t pp_rank) {
  switch (kind) {
    case PipelineSchedule::one_f_one_b:
      return actions_of_1f1b(shape, pp_rank);
    case PipelineSchedule::zb_h1:
      return actions_of_zb_h1(shape, pp_rank);
  }
  MOEBIUS_FAIL(internal, "step_schedule: unknown schedule {}", static_cast<int>(kind));
}

}  // namespace

Schedule step_schedule_of(PipelineSchedule kind, const PipelineShape& shape, int64_t pp_rank) {
  Schedule schedule{shape, std::vector<std::vector<Action>>(static_cast<size_t>(shape.num_ranks))};
  schedule.actions[static_cast<size_t>(pp_rank)] = actions_of(kind, shape, pp_rank);
  return schedule;
}

Schedule step_schedule(PipelineSchedule kind, const PipelineShape& shape) {
  shape.check();
  Schedule schedule{shape, {}};
  for (int64_t pp_rank = 0; pp_rank < shape.num_ranks; ++pp_rank)
    schedule.actions.push_back(actions_of(kind, shape, pp_rank));
  return schedule;
}

Schedule schedule_1f1b(const PipelineShape& shape) { return step_schedule(PipelineSchedule::one_f_one_b, shape); }

Schedule schedule_zb_h1(const PipelineShape& shape) { return step_schedule(PipelineSchedule::zb_h1, shape); }

}  // namespace moebius
