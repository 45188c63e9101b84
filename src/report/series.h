// Series of any length in bounded memory.
// A series has one value per record; a grid has a column of values per record.
// Records are put into bins of equal numbers of records.
// When the bins are full, neighbours are merged, and each bin then holds twice as many records.
// A bin keeps the minimum and the maximum of its records, so that no spike is lost.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace moebius {

struct SeriesBin {
  int64_t first_step = 0, last_step = 0;
  int64_t count = 0;  // records in this bin, at least 1
  double min = 0, max = 0, sum = 0;
  double mean() const { return sum / static_cast<double>(count); }
};

class Series {
 public:
  static constexpr int64_t kBins = 1440;
  explicit Series(int64_t capacity = kBins) : capacity_(capacity) {}  // capacity: bins, even, at least 2

  // Adds the value of a step. Values that are not finite, or beyond 1e290, are counted and not stored.
  void add(int64_t step, double value);

  const std::vector<SeriesBin>& bins() const { return bins_; }
  // Returns the series in at most max_bins bins.
  std::vector<SeriesBin> bins(int64_t max_bins) const;
  bool empty() const { return bins_.empty(); }
  int64_t count() const { return count_; }  // of finite values
  int64_t not_finite() const { return not_finite_; }
  // These consider finite values only. REQUIRES: count() > 0.
  double last() const { return last_; }
  int64_t last_step() const { return bins_.back().last_step; }
  double min() const;
  double max() const;

 private:
  int64_t capacity_, width_ = 1;  // records in a full bin
  std::vector<SeriesBin> bins_;
  int64_t count_ = 0, not_finite_ = 0;
  double last_ = 0;
};

struct GridColumn {
  int64_t first_step = 0, last_step = 0;
  int64_t records = 0;
  std::vector<float> sums;
  std::vector<uint32_t> counts;  // the number of finite values, by row
  // The mean of a row; NaN where the column has no value.
  double mean(int64_t row) const;
};

class Grid {
 public:
  static constexpr int64_t kColumns = 240;
  explicit Grid(int64_t capacity = kColumns) : capacity_(capacity) {}  // capacity: columns, even, at least 2

  // Adds the values of a step, one per row; those beyond 1e30 count as missing. The number of rows may change.
  void add(int64_t step, std::span<const double> values);

  const std::vector<GridColumn>& columns() const { return columns_; }
  bool empty() const { return columns_.empty(); }
  int64_t rows() const { return rows_; }                     // the maximum over the records
  const std::vector<double>& last() const { return last_; }  // values of the newest record
  // The mean of a row over the newest `columns` columns; NaN where they have no value.
  double recent_mean(int64_t row, int64_t columns) const;

 private:
  int64_t capacity_, width_ = 1, rows_ = 0;
  std::vector<GridColumn> columns_;
  std::vector<double> last_;
};

}  // namespace moebius
