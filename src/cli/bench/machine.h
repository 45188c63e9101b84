// `moebius bench machine`: a machine file of `moebius plan`, from measurements of this machine.
#pragma once

#include "bench/bench.h"
#include "bench/ranks.h"
#include "cli/bench/options.h"
#include "core/log.h"
#include "plan/machine.h"
#include "plan/work_time.h"

namespace moebius {

// The measurements of a machine, and what its system says.
struct MachineMeasurements {
  std::string device;  // its name
  bool is_gpu = false;
  int64_t threads = 1;                       // of a CPU
  double memory_bytes = 0;                   // of the device
  double host_memory_bytes = 0;              // of the host
  double multiprocessors = 0;                // of a GPU
  double datasheet_flops_per_s = 0;          // of bf16 products; 0: not known, and the measured rate stands for it
  BenchReport products, experts, attention;  // bench_gemm(), bench_experts(), bench_attention()
  HeadWidths heads;                          // of the measured attention
  double kernel_us = 0;                      // of an op that does next to nothing
  int64_t ranks = 1;
  std::vector<CollectiveLine> gathers;  // all_gather among the ranks, the smallest message first; empty for one rank
};

// Runs the workloads on the spec's device, and with several ranks (threads of this process) their collectives.
MachineMeasurements measure_machine(const BenchSpec& spec, int64_t ranks);

// Returns the machine file. The source of a value that cannot be measured says so. The source of a measurement whose
// runs differ says "noisy", and by how much.
// Throws Error{usage} with the value if a measured one is outside of the range that a machine file may have.
PlanMachine machine_of(const MachineMeasurements& measured);

// Prints it as TOML, with --json as JSON. Warns of noisy measurements.
void run_bench_machine(const BenchOptions& o, Log& log);

}  // namespace moebius
