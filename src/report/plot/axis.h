// Axes of plots: the mapping from values to positions, and the values with a tick mark.
#pragma once

#include <string>
#include <vector>

#include "report/plot/text.h"

namespace moebius {

struct PlotAxis {
  double low = 0, high = 1;       // values at the ends; low < high
  double begin = 0, end = 1;      // positions of these
  bool is_log = false;            // low > 0
  double at(double value) const;  // the position of a value
};

// Returns an axis around these values with round ends and at least 3 intervals. It is logarithmic if all values are
// above 0 and the greatest is at least 100 times `usual`.
PlotAxis value_axis(double low, double high, double usual);
// Returns about `about` tick marks with a step of 1, 2 or 5 times a power of ten; on a logarithmic axis powers of ten.
std::vector<double> tick_values(const PlotAxis& axis, int about);
// Returns tick marks at whole numbers; one if low and high are equal.
std::vector<int64_t> step_ticks(int64_t low, int64_t high, int about);

std::string step_text(int64_t step);   // "1500", "150 k", "2.5 M"
std::string place_text(double place);  // with at most one digit after the point

}  // namespace moebius
