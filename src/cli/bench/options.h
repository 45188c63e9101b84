// What `moebius bench` can be told, and which workload takes it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"

namespace CLI {
class App;
}

namespace moebius {

struct BenchOptions {
  std::string name, recipe, device, shape, routing = "balanced";
  std::vector<std::string> overrides;
  std::string dispatcher = "auto";
  std::optional<int64_t> runs;
  int64_t steps = 3, ranks = 1, etp = 1;
  BenchSpec spec{.threads = 0};
  bool profile = false, hash = false, json = false;
};

void add_bench_options(CLI::App& command, BenchOptions& o);

// Error{usage} for a workload that is not there, one given an option that it does not take, and values that mean
// nothing. Sets the routing.
void check_bench_options(const CLI::App& command, BenchOptions& o);

// The machine, and the GPU when that is what is timed. threads: 0 says nothing of them.
std::string bench_machine(DeviceKind device, int threads);

}  // namespace moebius
