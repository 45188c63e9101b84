// `moebius bench machine`: a machine file of `moebius plan`, from measurements of this machine.
#pragma once

#include "bench/bench.h"
#include "bench/ranks.h"
#include "cli/bench/options.h"
#include "core/log.h"
#include "plan/machine.h"
#include "plan/work_time.h"

namespace moebius {

// The measurements of a machine, and what its operating system reports.
struct MachineMeasurements {
  std::string device;  // its name
  bool is_gpu = false;
  int capability = 0;                        // compute capability of a GPU, 10 * major + minor
  int64_t threads = 1;                       // threads of a CPU
  double memory_bytes = 0;                   // memory of the device
  double host_memory_bytes = 0;              // memory of the host
  double multiprocessors = 0;                // multiprocessors of a GPU
  double datasheet_flops_per_s = 0;          // rate of bf16 products; 0: unknown, the measured rate is used instead
  BenchReport products, experts, attention;  // bench_gemm(), bench_experts(), bench_attention()
  HeadWidths heads;                          // widths of the measured attention
  double kernel_us = 0;                      // time of an op with almost no work
  int64_t ranks = 1;
  std::vector<CollectiveLine> gathers;  // all_gather among the ranks, the smallest message first; empty for one rank
};

// Runs the workloads on the spec's device, and with several ranks (threads of this process) their collectives.
MachineMeasurements measure_machine(const BenchSpec& spec, int64_t ranks);

// Returns the machine file. The source of a value says if it was not measured. For products it says how much longer the
// median run took than the fastest, and "noisy" from 10 % on.
// Throws Error{usage} with the figure if a measured value is out of the range that a machine file allows.
PlanMachine machine_of(const MachineMeasurements& measured);

// Prints it as TOML, with --json as JSON. Warns of noisy measurements, and of other work on a CPU.
void run_bench_machine(const BenchOptions& o, Log& log);

}  // namespace moebius
