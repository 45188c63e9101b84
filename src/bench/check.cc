#include "bench/check.h"

#include <algorithm>
#include <cmath>

namespace moebius {
namespace {

double value(bf16 x) { return to_f32(x); }
double value(float x) { return x; }

// Eight parallel sums. A single sum would wait for each of its additions.
template <class T>
double dot_of(const T* a, const double* b, int64_t n) {
  double lanes[8] = {}, sum = 0;
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int64_t l = 0; l < 8; ++l) lanes[l] += value(a[i + l]) * b[i + l];
  }
  for (; i < n; ++i) sum += value(a[i]) * b[i];
  for (const double lane : lanes) sum += lane;
  return sum;
}

template <class T>
void add_of(std::vector<double>& sums, double factor, const T* row) {
  for (size_t i = 0; i < sums.size(); ++i) sums[i] += factor * value(row[i]);
}

}  // namespace

HostRows::HostRows(Stream& s, const Tensor& t, int64_t begin, int64_t num_rows)
    : view_(t), begin_(begin), columns_(t.dim(t.shape.rank() - 1)) {
  const int64_t row_bytes = columns_ * size_of(t.dtype);
  view_.data = static_cast<char*>(t.data) + begin * row_bytes;
  view_.shape = {num_rows, columns_};
  if (s.device() == DeviceKind::cpu) return;
  copy_.reset(new char[num_rows * row_bytes]);
  copy_to_host(s, copy_.get(), view_.data, num_rows * row_bytes);
  view_.data = copy_.get();
}

double HostRows::at(int64_t row, int64_t column) const {
  const int64_t i = (row - begin_) * columns_ + column;
  if (view_.dtype == DType::i32) return view_.ptr<int32_t>()[i];
  return view_.dtype == DType::f32 ? view_.ptr<float>()[i] : to_f32(view_.ptr<bf16>()[i]);
}

std::vector<double> HostRows::row(int64_t row) const {
  std::vector<double> values(columns_);
  for (int64_t i = 0; i < columns_; ++i) values[i] = at(row, i);
  return values;
}

double HostRows::dot(int64_t row, const std::vector<double>& with) const {
  const int64_t first = (row - begin_) * columns_;
  if (view_.dtype == DType::f32) return dot_of(view_.ptr<float>() + first, with.data(), columns_);
  return dot_of(view_.ptr<bf16>() + first, with.data(), columns_);
}

void HostRows::add_to(std::vector<double>& sums, double factor, int64_t row) const {
  const int64_t first = (row - begin_) * columns_;
  if (view_.dtype == DType::f32) return add_of(sums, factor, view_.ptr<float>() + first);
  return add_of(sums, factor, view_.ptr<bf16>() + first);
}

double dot(const HostRows& a, int64_t a_row, const HostRows& b, int64_t b_row) { return a.dot(a_row, b.row(b_row)); }

GatedAt::GatedAt(const GatedActivation& f, double gate, double up) {
  const double limit = f.limit, g = std::min(gate, limit), u = std::clamp(up, -limit, limit) + f.shift;
  const double sigmoid = 1 / (1 + std::exp(-f.alpha * g));
  by_up = std::abs(up) > limit ? 0 : g * sigmoid;
  by_gate = gate > limit ? 0 : u * sigmoid * (1 + f.alpha * g * (1 - sigmoid));
  a = g * sigmoid * u;
}

std::vector<int64_t> sampled(int64_t num_rows, int64_t max_samples) {
  std::vector<int64_t> rows;
  for (int64_t i = 0; i < max_samples; ++i) rows.push_back(i * (num_rows - 1) / (max_samples - 1));
  rows.erase(std::unique(rows.begin(), rows.end()), rows.end());
  return rows;
}

void BenchSample::add(double got, double expected, double size) {
  ++elements_;
  got_ += got;
  expected_ += expected;
  squares_off_ += (got - expected) * (got - expected);
  expected_squares_ += expected * expected;
  size_squares_ += std::max(expected * expected, size * size);
}

double BenchSample::relative_error() const {
  return std::sqrt(squares_off_ / (size_squares_ > 0 ? size_squares_ : static_cast<double>(elements_)));
}

double quantised_error(DType left) { return 0.41 * std::hypot(left == DType::f8_e5m2 ? 0x1p-3 : 0x1p-4, 0x1p-4); }

DType gradient_element(PrecisionRecipe recipe) {
  return recipe == PrecisionRecipe::fp8_tensor ? DType::f8_e5m2 : DType::f8_e4m3;
}

double BenchLine::largest_error() const {
  double largest = 0;
  for (const auto& [result, error] : errors) largest = std::max(largest, error);
  return largest;
}

void check_sample(BenchLine& line, const std::string& result, const BenchSample& sample, double tolerance) {
  line.checksum += sample.sum_of_got();
  line.expected += sample.sum_of_expected();
  const double error = line.errors[result] = sample.relative_error();
  MOEBIUS_CHECK(numerics, error <= tolerance && sample.error_is_below_third(),
                "bench {}: expected {} within {:.2g} of plain loops, relative to its size; "
                "got {:.2g}; the result is wrong",
                line.name, result, tolerance, error);
}

}  // namespace moebius
