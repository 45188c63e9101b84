// Rows to their experts and back, timed on the ranks of a world, with the bytes
// that they send beside what the formulas say.
#pragma once

#include <string>
#include <vector>

#include "bench/shapes.h"
#include "comm/transport/transport.h"
#include "config/parallel_spec.h"

namespace moebius {

struct DispatchBenchSpec {
  std::string shape = "bench-cpu";
  double scale = 1.0;  // of the shape, for tests
  BenchRouting routing;
  DispatcherKind dispatcher = DispatcherKind::automatic;
  int64_t etp = 1;  // ep is what is left of the ranks
  int threads = 1;  // of a rank
  int64_t runs = 7;
};

// One call of a dispatcher.
struct DispatchLine {
  std::string name;
  double median_ms = 0;    // of the slowest rank
  double sent_bytes = 0;   // by a rank, the mean over the ranks, counted by the group
  double route_bytes = 0;  // the same from the route that the tokens took: equal to what was sent, or Error{numerics}
  double expected_bytes = 0;  // the closed formula: all-gather exactly that, all-to-all where experts are chosen evenly
};

struct DispatchBench {
  std::string dispatcher, axis;  // "allgather", "ep"
  int64_t ranks = 1, ep = 1, etp = 1;
  BenchShape shape;              // T of a rank
  double busiest_over_mean = 1;  // rows that the busiest rank got
  std::vector<DispatchLine> lines;
  // One process: dispatch and combine where all experts live, against a plain loop that copies a row for each pair.
  // Bytes read and written over the time.
  double local_gbytes_per_s = 0, copy_gbytes_per_s = 0;
  double times_slower_than_copy() const { return copy_gbytes_per_s / local_gbytes_per_s; }
};

// All ranks of the world call it and get the same. Experts that return their rows: y must be what the weights say, else
// Error{numerics}. bf16 rows. Error{usage} when etp does not divide the ranks, or ep = ranks / etp the experts.
DispatchBench bench_dispatch(const DispatchBenchSpec& spec, Transport& world);

}  // namespace moebius
