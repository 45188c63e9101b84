// A plot of values over steps, as an SVG figure.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "report/plot/text.h"
#include "report/run_data.h"

namespace moebius {

struct PlotLine {
  std::string name;      // label at the end of the line and of the values under the pointer; may be empty
  int colour = 0;        // 0 to 7
  const Series* series;  // not empty
  bool dots = false;     // a dot for each value
};

struct StepMark {
  int64_t step = 0;
  bool is_restart = false;  // else a checkpoint
};

struct LinePlot {
  std::string id, title, note;
  Unit unit = Unit::plain;
  std::vector<PlotLine> lines;
  std::optional<double> limit;  // a horizontal line, drawn if it is within the range of the values
  std::string limit_name;
  std::vector<StepMark> marks;
  bool from_zero = false;  // the axis of values begins at 0
};

// Each line is drawn from at most 720 bins: a band from the minimum to the maximum of each, and the means.
std::string figure_of(const LinePlot& plot);

}  // namespace moebius
