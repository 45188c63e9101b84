// What the benchmarks share: memory with random contents, timing, and the comparison with the expected sum.
#pragma once

#include <deque>

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

 private:
  Stream& s_;
  std::deque<Buffer> buffers_;
};

// One element of an f32 or bf16 tensor.
double element(const Tensor& t, int64_t index);
// Of `of` rows, a few that are checked: first, last and some between.
std::vector<int64_t> sampled(int64_t of);
// max(1, round(size * scale)).
int64_t scaled(int64_t size, double scale);

// Times body and fills median, min and runs.
void time_runs(BenchLine& line, int64_t runs, const std::function<void()>& body);
// Error{numerics} when the checksum is further from expected than `tolerance`, absolute.
void check_sum(const BenchLine& line, double tolerance);
// What rounding may do to a sum of n outputs of about this magnitude: each is off by at most half a unit of its dtype,
// at random, and eight times the expected error is never met by chance.
double rounding(DType dtype, double n, double magnitude);

}  // namespace moebius
