// Horizontal stacked bars, as an SVG figure.
#pragma once

#include <string>
#include <vector>

#include "report/plot/text.h"

namespace moebius {

struct BarPart {
  std::string name;
  double value = 0;  // at least 0
  int colour = 0;    // 0 to 7
};

struct Bar {
  std::string name;
  std::vector<BarPart> parts;
  std::string note;         // printed after the bar; empty: the sum of its parts
  bool is_warning = false;  // the note is a warning
};

struct BarChart {
  std::string id, title, note;
  Unit unit = Unit::plain;
  std::vector<Bar> bars;
};

std::string figure_of(const BarChart& chart);

}  // namespace moebius
