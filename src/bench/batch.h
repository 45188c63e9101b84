// The tokens that benchmarks of whole steps train on.
#pragma once

#include "config/run_spec.h"
#include "engine/engine.h"

namespace moebius {

// What a rank with this share has of its m-th micro-batch of a step: random ids, targets the ids that follow. The
// global batch is a pure function of (seed, step).
void fill_bench_batch(MicroBatch& batch, const RunSpec& run, int64_t step, int64_t m, const DataShare& share = {});

}  // namespace moebius
