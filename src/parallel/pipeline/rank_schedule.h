// The schedule of one rank, for those who look at a rank without running the others.
#pragma once

#include "parallel/pipeline/schedule.h"

namespace moebius {

// schedule_1f1b() with the list of pp_rank alone; the lists of the other ranks are empty. The same errors.
Schedule schedule_1f1b_of(const PipelineShape& shape, int64_t pp_rank);

}  // namespace moebius
