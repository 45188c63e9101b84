// The result of `moebius bench precision` as text or JSON.
#pragma once

#include "bench/precision.h"
#include "cli/bench/options.h"

namespace moebius {

void print_precision(const BenchOptions& o, const RunSpec& run, const PrecisionBench& bench);

}  // namespace moebius
