// What the benchmarks compute beside what plain loops in double give for it: elements of the results are compared one
// by one, relative to the size of what is expected.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Rows [begin, begin + num_rows) of a tensor seen as a matrix of its last dimension, in host memory. f32, bf16 or i32.
class HostRows {
 public:
  HostRows(Stream& s, const Tensor& t, int64_t begin, int64_t num_rows);
  double at(int64_t row, int64_t column) const;  // row of the tensor
  std::vector<double> row(int64_t row) const;
  double dot(int64_t row, const std::vector<double>& with) const;            // f32 or bf16
  void add_to(std::vector<double>& sums, double factor, int64_t row) const;  // sums += factor * row; f32 or bf16
  int64_t columns() const { return columns_; }

 private:
  Tensor view_;
  int64_t begin_, columns_;
  std::unique_ptr<char[]> copy_;
};
double dot(const HostRows& a, int64_t a_row, const HostRows& b, int64_t b_row);

// a = silu(gate) up, and its slopes.
struct SwigluAt {
  SwigluAt(double gate, double up);
  double a, by_gate, by_up;
};

// Of `of` rows, a few that are checked: the first, the last and some between, as far from each other.
std::vector<int64_t> sampled(int64_t of, int64_t most = 4);

// Elements of one result, each with what is expected of it.
class BenchSample {
 public:
  // size: of the terms that expected is the sum of, where they may cancel; their rounding stays.
  void add(double got, double expected, double size = 0);
  // |got - expected| / |expected|, norms over all elements, a larger size in place of the expected. Where all of it is
  // 0 (of a query that sees one key, dq is) the difference of an element, root mean square.
  double relative_error() const;
  // Whether the norm of what is off is below a third of the expected's own; also where that is 0.
  bool is_off_by_less_than_a_third() const { return expected_squares_ == 0 || 9 * squares_off_ < expected_squares_; }
  double sum_of_got() const { return got_; }
  double sum_of_expected() const { return expected_; }

 private:
  int64_t elements_ = 0;
  double got_ = 0, expected_ = 0, squares_off_ = 0, expected_squares_ = 0, size_squares_ = 0;
};

// Bounds on the relative error. What is wrong is far above them: zeros are off by 1, a result without its mask by about
// as much, one with a factor of 1.05 by 0.05.
//   bf16     A value rounded to bf16 is off by at most 2^-8 of itself, 0.41 of that root mean square, at random. A
//            result has come through at most 6 roundings (y: x W1, activation, W2, its sum; gradients two more), the
//            slope of SwiGLU makes up to twice as much of one: 0.41 sqrt(6) 2 = 2 units, and twice that is never met
//            by chance.
//   f32_sum  f32 sums of bf16 products. Tensor cores cut off what does not fit rather than round it, so that errors
//            add up: 2^-24 for each 16 of at most 2^15 products is 2^-13; eight times that.
//   f32      Products of f32, at most 2^13 of them, each addition rounded at random: 2^-24 sqrt(2^13) = 2^-17.5; eight
//            times that. Factors rounded to TF32 would be off by 2^-12 and more.
constexpr double kBf16Tolerance = 4 * 0x1p-8, kF32SumTolerance = 0x1p-10, kF32Tolerance = 0x1p-14;

// Adds the sums of the sample to the line's, and its relative error under the name of the result. Error{numerics} when
// that is above `tolerance` or no number, and when a third of the expected is off.
void check_sample(BenchLine& line, const std::string& result, const BenchSample& sample, double tolerance);

}  // namespace moebius
