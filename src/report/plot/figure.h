// The parts that all figures have: a caption, an accessible name, and data for the values under the pointer.
#pragma once

#include <string>

#include "report/plot/markup.h"

namespace moebius {

struct FigureText {
  std::string id, title, note;
  std::string description;  // text for readers who cannot see the picture
};

inline constexpr double kFigureWidth = 400;

// Opens the elements `figure` and `svg`, with this height.
void open_figure(Markup& out, const FigureText& text, double height);
// Closes both elements. data: a JSON object; empty for a figure whose elements have data-tip.
void close_figure(Markup& out, const std::string& data);

}  // namespace moebius
