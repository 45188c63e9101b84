// Compares results of the benchmarks with plain loops in double. Sampled elements are compared one
// by one, relative to the size of the expected value.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/bench.h"
#include "core/tensor.h"
#include "device/device.h"
#include "ops/experts/experts.h"

namespace moebius {

// Rows [begin, begin + num_rows) of a tensor viewed as a matrix of its last dimension, in host
// memory. The dtype is f32, bf16 or i32.
class HostRows {
 public:
  HostRows(Stream& s, const Tensor& t, int64_t begin, int64_t num_rows);
  double at(int64_t row, int64_t column) const;  // row of the whole tensor
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

// The value a of a gated activation, and its derivatives.
struct GatedAt {
  GatedAt(const GatedActivation& f, double gate, double up);
  double a, by_gate, by_up;
};

// Returns the rows of [0, num_rows) that are checked: the first, the last and some between at equal distances.
std::vector<int64_t> sampled(int64_t num_rows, int64_t max_samples = 4);

// Elements of one result, each with its expected value.
class BenchSample {
 public:
  // Adds an element. `size` is that of the terms whose sum is `expected`. It matters where terms
  // cancel, because their rounding errors stay.
  void add(double got, double expected, double size = 0);
  // Returns |got - expected| / |expected|, with norms over all elements. A larger `size` replaces
  // the expected value in the denominator.
  // Where all expected values are 0, it is the root mean square of the differences. (dq of a query
  // that attends to one key is 0.)
  double relative_error() const;
  // Returns whether the norm of the errors is below a third of the norm of the expected values, or
  // the latter is 0.
  bool error_is_below_third() const { return expected_squares_ == 0 || 9 * squares_off_ < expected_squares_; }
  double sum_of_got() const { return got_; }
  double sum_of_expected() const { return expected_; }

 private:
  int64_t elements_ = 0;
  double got_ = 0, expected_ = 0, squares_off_ = 0, expected_squares_ = 0, size_squares_ = 0;
};

// Bounds on the relative error. Wrong results are far above them. Zeros have an error of 1, and a
// result without its mask about the same. A result with a factor of 1.05 has an error of 0.05.
//   bf16     A value rounded to bf16 has a random error of at most 2^-8 of itself, 0.41 of that in
//            root mean square. A result has passed at most 6 roundings (y: x W1, activation, W2,
//            its sum; gradients two more), and the slope of SwiGLU at most doubles one. That is
//            0.41 sqrt(6) 2 = 2 units. Twice that never happens by chance.
//   f32_sum  f32 sums of bf16 products. Tensor cores truncate instead of rounding, so errors add up:
//            2^-24 for each 16 of at most 2^15 products is 2^-13. The bound is eight times that.
//   f32      Products of f32, at most 2^13 of them, with random rounding in each addition:
//            2^-24 sqrt(2^13) is 2^-17.5. The bound is eight times that. Factors rounded to TF32 have
//            errors of 2^-12 or more.
constexpr double kBf16Tolerance = 4 * 0x1p-8, kF32SumTolerance = 0x1p-10, kF32Tolerance = 0x1p-14;

// The relative error of a sum of products whose operands were quantised, against the numbers before. left: the elements
// of the left operand; those of the right one are E4M3. An element of E4M3 errs by at most 2^-4 of itself, and of
// E5M2 by 2^-3: by 0.41 of that in root mean square. So a product of two errs by 0.036, or by 0.057 with E5M2, and so
// does a sum of such products.
double quantised_error(DType left);
// The elements of gradients that are operands: E4M3, or E5M2 with fp8_tensor.
DType gradient_element(PrecisionRecipe recipe);

// Adds the sums of the sample to those of the line, and its relative error under the name of the
// result. Throws Error{numerics} when the error is above `tolerance` or NaN, and when the errors
// are a third of the expected values.
void check_sample(BenchLine& line, const std::string& result, const BenchSample& sample, double tolerance);

}  // namespace moebius
