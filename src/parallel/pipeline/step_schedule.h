// The schedule of a training step, as parallel.schedule names it.
#pragma once

#include "config/parallel_spec.h"
#include "parallel/pipeline/schedule.h"

namespace moebius {

// Returns schedule_1f1b() or schedule_zb_h1(). The same errors.
Schedule step_schedule(PipelineSchedule kind, const PipelineShape& shape);

// step_schedule() with the list of pp_rank alone, for those who look at a rank without running the others; the lists of
// the other ranks are empty. The same errors.
Schedule step_schedule_of(PipelineSchedule kind, const PipelineShape& shape, int64_t pp_rank);

}  // namespace moebius
