// A bound of a step's time that a search finds faster than the step.
#pragma once

#include "plan/predict.h"

namespace moebius {

// Returns the seconds of a step without the optimizer, and without what a step exchanges once or for sharded layers: at
// most predict()'s step_s with `simulate` off. composes: as PredictOptions's. Errors are those of predict().
// REQUIRES: run.model.check() has passed.
double passes_seconds(PartLibrary& parts, const RunSpec& run, int64_t ranks, const PlanMachine& machine,
                      const Assumptions& assume, bool composes);

}  // namespace moebius
