// The tokens that benchmarks of whole steps train on.
#pragma once

#include "config/run_spec.h"
#include "model/step.h"

namespace moebius {

// Micro-batch m of the global batch of a step: random ids, targets the ids that follow, a pure function of (seed, step,
// m). REQUIRES: the batch holds whole sequences.
void fill_bench_batch(MicroBatch& batch, const RunSpec& run, int64_t step, int64_t m);

}  // namespace moebius
