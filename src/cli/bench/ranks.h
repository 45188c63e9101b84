// `moebius bench step` on several ranks, and `moebius bench collectives`.
#pragma once

#include "config/run_spec.h"

namespace moebius {

struct RanksBenchOptions {
  std::string machine, recipe;
  int64_t ranks = 1, steps = 3;  // ranks: threads of this process; 1: the launcher's ranks
  int threads = 0;               // CPU threads of a rank; 0: its share of the machine
  bool json = false, profile = false;
};

// Returns the seconds that a rank of a benchmark waits for another: 60, and 1800 where a GPU has no native code,
// since the driver then compiles PTX for minutes in the first run.
double bench_timeout_s();
// Returns whether --ranks or the launcher asks for several ranks.
bool has_several_ranks(int64_t ranks);
void run_bench_step_of_ranks(const RanksBenchOptions& o, const RunSpec& run);
void run_bench_collectives(const RanksBenchOptions& o, DeviceKind device);

}  // namespace moebius
