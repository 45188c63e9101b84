// The results of `moebius bench` as text or JSON.
#pragma once

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "cli/bench/options.h"

namespace moebius {

void print_report(const BenchOptions& o, const BenchReport& r);
// Prints the ops of work that ran `runs` times. of: its name, "a step".
void print_profile(const std::map<std::string, OpTotal>& totals, const char* of, int64_t runs);
nlohmann::ordered_json ops_json(const std::map<std::string, OpTotal>& totals);
// memory: what was chosen about the run's memory; empty if nothing was.
void print_step(const BenchOptions& o, const RunSpec& run, const std::string& memory, const StepBench& r);
// Returns optimizer.offload_buffer of a run with optimizer.offload, else nothing.
std::optional<double> printed_buffer(const RunSpec& run);

}  // namespace moebius
