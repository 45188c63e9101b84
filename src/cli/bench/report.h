// The results of `moebius bench` as text or JSON.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "cli/bench/options.h"

namespace moebius {

void print_report(const BenchOptions& o, const BenchReport& r);
void print_step(const BenchOptions& o, const RunSpec& run, const StepBench& r);

}  // namespace moebius
