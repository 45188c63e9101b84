// Times the dispatch of rows to their experts and the combine of the results, on the ranks of a
// world. Bytes sent are compared with the formulas.
#pragma once

#include <string>
#include <vector>

#include "bench/shapes.h"
#include "comm/transport/transport.h"
#include "config/parallel_spec.h"
#include "core/tensor.h"
#include "device/kernel_choice.h"

namespace moebius {

struct DispatchBenchSpec {
  std::string shape = "bench-cpu";
  double scale = 1.0;  // scales the shape, for tests
  BenchRouting routing;
  DispatcherKind dispatcher = DispatcherKind::automatic;
  int64_t etp = 1;  // ep = ranks / etp
  int64_t ranks_per_node = 8;
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;  // threads of a rank
  int64_t runs = 7;
  int sms = 0;  // multiprocessors of a GPU for the direct dispatcher's copies; 0: all that they can use
  KernelChoice kernels = KernelChoice::automatic;  // kernels that a GPU uses
};

// One call of a dispatcher.
struct DispatchLine {
  std::string name;
  double median_ms = 0;       // time of the slowest rank
  double sent_bytes = 0;      // on the wire, by a rank, the mean over the ranks; counted by the group
  double route_bytes = 0;     // computed from the tokens' route; must equal sent_bytes, else Error{numerics}
  double expected_bytes = 0;  // by the formula: exact for all-gather, and for the others with balanced routing
  // Bytes of a row for each pair and each rank of its expert, whether or not they leave the rank. So this is
  // more than the bytes on the wire.
  double logical_bytes = 0;
  // The bytes of sent_bytes and route_bytes that go to ranks of other nodes; with the two-level dispatcher.
  double across_bytes = 0, across_route_bytes = 0;
  double inside_bytes() const { return sent_bytes - across_bytes; }
};

// A call alone, in a CUDA graph that is replayed: all ranks begin together, and end when the last one has.
struct DispatchRate {
  std::string name;
  double ms = 0;
  double wire_bytes = 0;    // bytes that leave a rank
  double useful_bytes = 0;  // bytes of rows among them; captured messages of two-level are sized for all tokens
  double wire_gbytes_per_s() const { return wire_bytes / ms * 1e-6; }
};

struct DispatchBench {
  std::string dispatcher, axis;  // "allgather", "ep"
  int64_t ranks = 1, ep = 1, etp = 1;
  int64_t nodes = 1;             // nodes of two-level
  BenchShape shape;              // shape with the T of one rank
  double busiest_over_mean = 1;  // rows of the busiest rank over the mean
  std::vector<DispatchLine> lines;
  // On GPUs, of dispatchers that graphs may hold, and unless the messages are staged: dispatch and combine.
  std::vector<DispatchRate> rates;
  // With one rank, and with the direct dispatcher: the rates of dispatch and combine, and of a copy. A rate is bytes
  // read and written by all ranks over the time of the slowest. On a GPU each is a CUDA graph.
  // The copy is of the same number of bytes. With one rank on a CPU it is a plain loop that copies a row for each pair.
  double dispatch_gbytes_per_s = 0, copy_gbytes_per_s = 0;
  double times_slower_than_copy() const { return copy_gbytes_per_s / dispatch_gbytes_per_s; }
};

// Runs on all ranks of the world together, and returns the same on each. Rows are bf16. The experts
// return their rows unchanged.
// Throws Error{numerics} unless y is the sum that the weights give. Throws Error{usage} when etp does not
// divide the ranks, ep = ranks / etp does not divide the experts, or the dispatcher cannot run on these ranks.
DispatchBench bench_dispatch(const DispatchBenchSpec& spec, Transport& world);

}  // namespace moebius
