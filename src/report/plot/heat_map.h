// A heat map, as an SVG figure.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/plot/text.h"
#include "report/series.h"

namespace moebius {

enum class HeatScale {
  rising,      // from `low` to `high`
  rising_log,  // the same on a logarithmic scale
  around_one,  // two colours, below and above 1, from 1/2 to 2 on a logarithmic scale
};

struct HeatMap {
  std::string id, title, note;
  std::string row, column;                         // the names of the axes: "layer", "step"
  std::vector<std::string> rows, columns;          // their names
  std::vector<std::pair<int64_t, int64_t>> steps;  // first and last step of each column, instead of names
  std::vector<double> values;                      // [rows, columns], NaN: none
  HeatScale scale = HeatScale::rising;
  double low = 0, high = 1;
  Unit unit = Unit::plain;
  std::string after;  // printed after a value: " of the mean"
};

// Returns a heat map of a grid over steps, with at most max_columns columns. row_names: one for each row of the grid.
HeatMap heat_of_grid(const Grid& grid, std::vector<std::string> row_names, int64_t max_columns = 120);

std::string figure_of(const HeatMap& map);

}  // namespace moebius
