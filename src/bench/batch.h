// The tokens on which benchmarks of whole steps train.
#pragma once

#include "config/run_spec.h"
#include "engine/engine.h"

namespace moebius {

// Fills the m-th micro-batch of a step, for a rank with this share. Ids are random, and targets are
// the ids that follow.
// The global batch is a pure function of (seed, step).
void fill_bench_batch(MicroBatch& batch, const RunSpec& run, int64_t step, int64_t m, const DataShare& share = {});

}  // namespace moebius
