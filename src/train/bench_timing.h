// What the benchmarks share: the device, memory with random contents, timing, and the comparison with the expected sum.
#pragma once

#include <deque>
#include <functional>
#include <memory>

#include "core/accelerator.h"
#include "core/device.h"
#include "core/rng.h"
#include "core/tensor.h"
#include "train/bench.h"

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

  // Fills median, min and runs; on a GPU by the device's clock, with its caches written over before each run. Returns
  // how often body was called.
  int64_t time(BenchLine& line, const std::function<void()>& body);
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

// Rows [begin, begin + num_rows) of a tensor seen as a matrix of its last dimension, in host memory. f32, bf16 or i32.
class HostRows {
 public:
  HostRows(Stream& s, const Tensor& t, int64_t begin, int64_t num_rows);
  double at(int64_t row, int64_t column) const;  // row of the tensor
  int64_t columns() const { return columns_; }

 private:
  Tensor view_;
  int64_t begin_, columns_;
  std::unique_ptr<char[]> copy_;
};
double dot(const HostRows& a, int64_t a_row, const HostRows& b, int64_t b_row);

// Of `of` rows, a few that are checked: first, last and some between.
std::vector<int64_t> sampled(int64_t of);
// Error{numerics} when the checksum is further from expected than `tolerance`, absolute.
void check_sum(const BenchLine& line, double tolerance);
// What rounding may do to a sum of n outputs of about this magnitude: each is off by at most half a unit of its dtype,
// at random, and eight times the expected error is never met by chance.
double rounding(DType dtype, double n, double magnitude);

}  // namespace moebius
