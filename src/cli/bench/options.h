// The options of `moebius bench`, and which workload takes which.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "cli/parse/arguments.h"

namespace moebius {

struct BenchOptions {
  std::string name, recipe, device, shape, routing = "balanced", operands = "bf16";
  std::vector<std::string> overrides;
  std::string dispatcher = "auto", kernels = "auto";
  std::optional<int64_t> runs;
  int64_t steps = 3, ranks = 1, etp = 1, ranks_per_node = 8, sms = 0;
  BenchSpec spec{.threads = 0};
  bool profile = false, hash = false, json = false;
};

void add_bench_options(Command& command, BenchOptions& o);

// Sets the routing. Throws Error{usage} for an unknown workload, an option that the workload does not
// take, or a value that makes no sense.
void check_bench_options(const Command& command, BenchOptions& o);

// Returns the machine, and the GPU if that is timed. threads: 0 leaves them out.
std::string bench_machine(DeviceKind device, int threads);

}  // namespace moebius
