// `moebius bench dispatch`: over the ranks of a launcher, or threads.
#pragma once

#include "bench/dispatch.h"

namespace moebius {

// ranks: as threads; 1: those of the launcher. Prints on the first rank.
void run_bench_dispatch(DispatchBenchSpec spec, int64_t ranks, bool json);

}  // namespace moebius
