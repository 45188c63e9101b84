// The checks of a run, for those who check many runs of one model.
#pragma once

#include <cstdint>

#include "config/run_spec.h"

namespace moebius {

// Does the same as RunSpec::check(), without ModelSpec::check(). REQUIRES: run.model.check() has passed.
void check_except_model(const RunSpec& run, int64_t world_size);

}  // namespace moebius
