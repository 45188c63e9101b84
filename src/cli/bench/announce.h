// `moebius bench announce`.
#pragma once

#include "bench/announce.h"
#include "cli/bench/options.h"

namespace moebius {

void run_bench_announce(const BenchOptions& o);

}  // namespace moebius
