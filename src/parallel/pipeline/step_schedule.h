// The schedule of a training step, as parallel.schedule names it.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

// Returns schedule_1f1b() or schedule_zb_h1(), and throws their errors.
Schedule step_schedule(PipelineSchedule kind, const PipelineShape& shape);

// Does the same, but with the list of pp_rank only; the lists of the other ranks are empty. It is for callers that
// examine one rank.
Schedule step_schedule_of(PipelineSchedule kind, const PipelineShape& shape, int64_t pp_rank);

}  // namespace moebius
