// What the benchmarks share: the device, memory with random contents, and timing.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>

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

// A device, and work on it that is timed.
class BenchDevice {
 public:
  explicit BenchDevice(const BenchSpec& spec) : BenchDevice(spec.device, spec.threads, spec.runs) {}
  BenchDevice(DeviceKind device, int threads, int64_t runs);
  Stream& stream() { return *stream_; }
  ThreadPool& pool() { return pool_; }
  bool is_gpu() const { return gpu_ != nullptr; }

  // Fills median, min and runs; on a GPU by the device's clock, after a second of rest, with its caches written over
  // before each run. Returns how often body was called.
  int64_t time(BenchLine& line, const std::function<void()>& body);
  // What every op of body took, all runs together, one op after the other as they follow in it.
  std::map<std::string, OpTotal> profile(int64_t runs, const std::function<void(Stream&)>& body);
  // The edge of the square matrices of a matrix rate.
  int64_t matrix_size(double scale) const { return scaled(is_gpu() ? 8192 : 2048, scale); }
  Ceilings measure_ceilings(double scale);

 private:
  double time_once(const std::function<void()>& body);
  int64_t runs_for(double first_ms) const;

  ThreadPool pool_;
  std::unique_ptr<Accelerator> gpu_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<BenchTensors> tensors_;
  Tensor flush_;  // larger than the caches; only on a GPU
  int64_t runs_;
};

// The least time of ops one after the other: each takes its arithmetic or its bytes, whichever is longer.
double roofline_ms(const std::vector<Cost>& ops, const Ceilings& ceilings);
// What body asks of a stream that counts and runs nothing.
std::vector<Cost> costs_of(DeviceKind target, ThreadPool& pool, const std::function<void(Stream&)>& body);

}  // namespace moebius
