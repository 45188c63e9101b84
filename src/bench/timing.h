// The common parts of benchmarks: the device, memory with random contents, and timing.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "core/rng.h"
#include "core/tensor.h"
#include "device/accelerator.h"
#include "device/device.h"

namespace moebius {

class BenchTensors {
 public:
  explicit BenchTensors(Stream& s) : s_(s) {}
  Tensor zeros(Shape shape, DType dtype);
  Tensor normal(Shape shape, DType dtype, float std);
  Tensor bytes(int64_t num_bytes) { return zeros({num_bytes}, DType::u8); }
  Tensor ints(Shape shape, const std::vector<int32_t>& values);

 private:
  Stream& s_;
  std::deque<Buffer> buffers_;
};

// The times of bodies that ran in turns.
struct TimedRuns {
  std::vector<std::vector<double>> ms;  // [body][run]
  int64_t calls = 0;                    // calls of each body, with those before the timed runs
  // Fills median, min and runs.
  void fill(BenchLine& line, size_t body) const;
};

// Returns the element in the middle, the upper one of two. REQUIRES: values is not empty.
double median(std::vector<double> values);

// A device, and timed work on it.
class BenchDevice {
 public:
  explicit BenchDevice(const BenchSpec& spec) : BenchDevice(spec.device, spec.threads, spec.runs, spec.kernels) {
    under_load_ = spec.under_load;
  }
  BenchDevice(DeviceKind device, int threads, int64_t runs, KernelChoice kernels = KernelChoice::automatic);
  Stream& stream() { return *stream_; }
  ThreadPool& pool() { return pool_; }
  bool is_gpu() const { return gpu_ != nullptr; }

  // Fills median, min and runs, and returns how often body was called.
  // A GPU is timed by its own clock, with rests between the runs, or after a second of the same work and without rests
  // (BenchSpec::under_load).
  // Its caches are overwritten before each run.
  int64_t time(BenchLine& line, const std::function<void()>& body);
  // The same for several bodies that run in turns, so that a clock or other work that changes slows all of them alike.
  TimedRuns time_in_turns(const std::vector<std::function<void()>>& bodies);
  // Returns the time of every op of body, summed over the runs. The ops run one after the other, in
  // the order of body.
  std::map<std::string, OpTotal> profile(int64_t runs, const std::function<void(Stream&)>& body);
  // Returns the size of the square matrices whose rate is measured.
  int64_t matrix_size(double scale) const { return scaled(is_gpu() ? 8192 : 2048, scale); }
  Ceilings measure_ceilings(double scale);

 private:
  // Runs the bodies in turns for a second. Returns how often each was called.
  int64_t warm(const std::vector<std::function<void()>>& bodies);
  double time_once(const std::function<void()>& body);
  int64_t runs_for(double first_ms) const;

  ThreadPool pool_;
  std::unique_ptr<Accelerator> gpu_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<BenchTensors> tensors_;
  Tensor flush_;  // larger than the caches; only on a GPU
  int64_t runs_;
  bool under_load_ = false;
};

// Returns the least time of ops that run one after the other. Each takes the time of its arithmetic
// or of its bytes, whichever is longer.
double roofline_ms(const std::vector<Cost>& ops, const Ceilings& ceilings);
// Returns the costs of the ops of body, on a stream that counts them and runs none.
std::vector<Cost> costs_of(DeviceKind target, ThreadPool& pool, const std::function<void(Stream&)>& body);

}  // namespace moebius
