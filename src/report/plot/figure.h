// The parts that all figures have: a caption, an accessible name, data for the values under the pointer.
#pragma once

#include <string>

#include "report/plot/markup.h"

namespace moebius {

struct FigureText {
  std::string id, title, note;
  std::string description;  // for a reader who does not see the picture
};

inline constexpr double kFigureWidth = 400;

// Opens figure and svg of this height.
void open_figure(Markup& out, const FigureText& text, double height);
// Closes both. data: a JSON object; empty for a figure whose elements have data-tip.
void close_figure(Markup& out, const std::string& data);

}  // namespace moebius
