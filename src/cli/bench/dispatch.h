// `moebius bench dispatch`: over the ranks of a launcher, or threads.
#pragma once

#include "bench/dispatch.h"

namespace moebius {

// ranks: the number of threads to start as ranks; 1: the launcher's ranks. The first rank prints.
void run_bench_dispatch(DispatchBenchSpec spec, int64_t ranks, bool json);

}  // namespace moebius
