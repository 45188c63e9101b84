#include "report/series.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace moebius {
namespace {

// Sums and axes of values within these do not overflow, and no logarithm of them is infinite.
constexpr double kGreatest = 1e290, kMin = 1e-290;
constexpr double kGreatestInGrid = 1e30;  // its sums are f32

void merge(SeriesBin& into, const SeriesBin& bin) {
  into.last_step = bin.last_step;
  into.count += bin.count;
  into.min = std::min(into.min, bin.min);
  into.max = std::max(into.max, bin.max);
  into.sum += bin.sum;
}

void merge(GridColumn& into, const GridColumn& column) {
  into.last_step = column.last_step;
  into.records += column.records;
  if (column.sums.size() > into.sums.size()) {
    into.sums.resize(column.sums.size());
    into.counts.resize(column.sums.size());
  }
  for (size_t row = 0; row < column.sums.size(); ++row) {
    into.sums[row] += column.sums[row];
    into.counts[row] += column.counts[row];
  }
}

// Merges groups of `by` neighbours.
template <class Bin>
void merge_neighbours(std::vector<Bin>& bins, size_t by) {
  size_t kept = 0;
  for (size_t i = 0; i < bins.size(); ++i) {
    if (i % by != 0)
      merge(bins[kept - 1], bins[i]);
    else if (kept++ != i)
      bins[kept - 1] = std::move(bins[i]);
  }
  bins.resize(kept);
}

// Adds a record to the newest bin, or to a new bin if that is full.
template <class Bin>
void add_record(std::vector<Bin>& bins, Bin record, int64_t& width, int64_t capacity, int64_t Bin::*records) {
  if (!bins.empty() && bins.back().*records < width) return merge(bins.back(), record);
  if (std::ssize(bins) == capacity) {
    merge_neighbours(bins, 2);
    width *= 2;
  }
  bins.push_back(std::move(record));
}

}  // namespace

void Series::add(int64_t step, double value) {
  if (!(std::abs(value) <= kGreatest)) {
    ++not_finite_;
    return;
  }
  if (std::abs(value) < kMin) value = 0;
  ++count_;
  last_ = value;
  const SeriesBin record{.first_step = step, .last_step = step, .count = 1, .min = value, .max = value, .sum = value};
  add_record(bins_, record, width_, capacity_, &SeriesBin::count);
}

std::vector<SeriesBin> Series::bins(int64_t max_bins) const {
  std::vector<SeriesBin> merged = bins_;
  const size_t by = (merged.size() + static_cast<size_t>(max_bins) - 1) / static_cast<size_t>(max_bins);
  if (by > 1) merge_neighbours(merged, by);
  return merged;
}

double Series::min() const {
  return std::min_element(bins_.begin(), bins_.end(), [](auto& a, auto& b) { return a.min < b.min; })->min;
}

double Series::max() const {
  return std::max_element(bins_.begin(), bins_.end(), [](auto& a, auto& b) { return a.max < b.max; })->max;
}

double GridColumn::mean(int64_t row) const {
  const size_t at = static_cast<size_t>(row);
  if (at >= counts.size() || counts[at] == 0) return std::numeric_limits<double>::quiet_NaN();
  return sums[at] / counts[at];
}

void Grid::add(int64_t step, std::span<const double> values) {
  GridColumn record{.first_step = step, .last_step = step, .records = 1};
  record.sums.resize(values.size());
  record.counts.resize(values.size());
  for (size_t row = 0; row < values.size(); ++row) {
    if (!(std::abs(values[row]) <= kGreatestInGrid)) continue;
    record.sums[row] = static_cast<float>(values[row]);
    record.counts[row] = 1;
  }
  rows_ = std::max(rows_, std::ssize(values));
  last_.assign(values.begin(), values.end());
  add_record(columns_, std::move(record), width_, capacity_, &GridColumn::records);
}

double Grid::recent_mean(int64_t row, int64_t columns) const {
  GridColumn sum;
  for (size_t i = columns_.size() - std::min(columns_.size(), static_cast<size_t>(columns)); i < columns_.size(); ++i)
    merge(sum, columns_[i]);
  return sum.mean(row);
}

}  // namespace moebius
