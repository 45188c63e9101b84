// Times the ops by which the direct dispatcher announces routes, and by which the gradients of weights return, one by
// one. One device has the windows of all ranks, and runs their ops in turn: what is timed are the ops of rank 0,
// without the rounds between them.
#pragma once

#include <string>
#include <vector>

#include "bench/shapes.h"
#include "core/tensor.h"

namespace moebius {

struct AnnounceBenchSpec {
  std::string shape = "bench-cpu";
  double scale = 1.0;     // scales the shape, for tests
  int64_t sequences = 0;  // of a rank; 0: those of the shape
  int64_t ranks = 2;      // all of them are ep ranks
  BenchRouting routing;
  DeviceKind device = DeviceKind::cpu;
  int threads = 1;
  int64_t runs = 7;
};

struct AnnounceLine {
  std::string name;  // of an op; "announce": all ops up to the index of the rows that arrive, one after the other
  double us = 0;     // median time of a call; on a GPU, of many calls in a CUDA graph
};

struct AnnounceBench {
  BenchShape shape;  // with the T of one rank
  int64_t ranks = 1;
  std::vector<AnnounceLine> lines;
};

// Throws Error{numerics} unless the rows that arrive at rank 0 have the index that plain loops give them. Throws
// Error{usage} when the ranks do not divide the experts.
AnnounceBench bench_announce(const AnnounceBenchSpec& spec);

}  // namespace moebius
