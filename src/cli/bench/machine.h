// `moebius bench machine`: a machine file of `moebius plan`, from measurements of this machine.
#pragma once

#include "bench/bench.h"
#include "cli/bench/options.h"
#include "plan/machine.h"

namespace moebius {

// Products, experts, attention and copies of the spec's device; with several ranks (threads of this
// process) their collectives, too. What cannot be measured here is said to be so in its source.
PlanMachine measured_machine(const BenchSpec& spec, int64_t ranks);
void run_bench_machine(const BenchOptions& o);  // prints it as TOML, with --json as JSON

}  // namespace moebius
