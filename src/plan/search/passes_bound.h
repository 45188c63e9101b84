// A lower bound of a step's time that is faster to compute than the time itself.
#pragma once

#include "plan/predict.h"

namespace moebius {

// Returns the seconds of a step without the optimizer, without the exchanges that a step makes once, and without those
// of sharded layers: at most step_s of predict() with `simulate` off. It reads PredictOptions::checks, composes and
// times. Errors: see predict().
double passes_seconds(PartLibrary& parts, RunSpec run, int64_t ranks, const PlanMachine& machine,
                      const Assumptions& assume, const PredictOptions& options);

}  // namespace moebius
