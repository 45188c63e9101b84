// A heat map, as a figure of SVG.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "report/plot/text.h"
#include "report/series.h"

namespace moebius {

enum class HeatScale {
  rising,      // from `low` to `high`
  rising_log,  // the same in logarithms
  around_one,  // below and above 1 in two colours, from 1/2 to 2 in logarithms
};

struct HeatMap {
  std::string id, title, note;
  std::string row, column;                         // what a row and a column is: "layer", "step"
  std::vector<std::string> rows, columns;          // their names
  std::vector<std::pair<int64_t, int64_t>> steps;  // of each column, instead of names
  std::vector<double> values;                      // [rows, columns], NaN: none
  HeatScale scale = HeatScale::rising;
  double low = 0, high = 1;
  Unit unit = Unit::plain;
  std::string after;  // follows a value: " of the mean"
};

// Returns the columns of a grid over steps; row_names: as many as the grid has rows. At most `most` columns.
HeatMap heat_of_grid(const Grid& grid, std::vector<std::string> row_names, int64_t most = 120);

std::string figure_of(const HeatMap& map);

}  // namespace moebius
