#include "report/plot/bars.h"

#include <fmt/format.h>

#include <algorithm>

#include "report/plot/axis.h"
#include "report/plot/figure.h"
#include "report/plot/markup.h"

namespace moebius {
namespace {

constexpr double kLeft = 70, kRight = 296, kTop = 8;
constexpr size_t kManyBars = 12;

double sum_of(const Bar& bar) {
  double sum = 0;
  for (const BarPart& part : bar.parts) sum += part.value;
  return sum;
}

std::string description_of(const BarChart& chart) {
  std::string text;
  for (const Bar& bar : chart.bars) {
    text += fmt::format("{}{}: {}", text.empty() ? "" : " ", bar.name, number_text(sum_of(bar), chart.unit));
    for (const BarPart& part : bar.parts)
      text += fmt::format(", {} {}", part.name, number_text(part.value, chart.unit));
    text += bar.note.empty() ? "." : fmt::format("; {}.", bar.note);
  }
  return text;
}

void draw_bar(Markup& out, const BarChart& chart, const Bar& bar, double y, double height, double scale) {
  out.element("text", {{"x", place_text(kLeft - 8)}, {"y", place_text(y + height / 2 + 4)}, {"text-anchor", "end"}},
              truncated(bar.name, 11));
  double x = kLeft;
  for (const BarPart& part : bar.parts) {
    const double width = part.value * scale;
    if (width <= 0) continue;
    out.leaf("rect",
             {{"class", fmt::format("seg c{}", part.colour)},
              {"x", fmt::format("{:.2f}", x)},
              {"y", place_text(y)},
              {"width", fmt::format("{:.2f}", width)},
              {"height", place_text(height)},
              {"data-tip", fmt::format("{}\n{}  {}", bar.name, part.name, number_text(part.value, chart.unit))}});
    x += width;
  }
  const std::string note = bar.note.empty() ? number_text(sum_of(bar), chart.unit) : bar.note;
  out.element(
      "text",
      {{"class", bar.is_warning ? "hot" : "strong"}, {"x", place_text(x + 6)}, {"y", place_text(y + height / 2 + 4)}},
      note);
}

// The meaning of each colour, with no name twice.
void draw_legend(Markup& out, const BarChart& chart) {
  std::vector<std::string> said;
  out.open("ul", {{"class", "legend"}});
  for (const Bar& bar : chart.bars) {
    for (const BarPart& part : bar.parts) {
      if (part.value <= 0 || std::find(said.begin(), said.end(), part.name) != said.end()) continue;
      said.push_back(part.name);
      out.open("li").open("i", {{"class", fmt::format("c{}", part.colour)}}).close("i").text(part.name).close("li");
    }
  }
  out.close("ul");
}

}  // namespace

std::string figure_of(const BarChart& chart) {
  const bool many = chart.bars.size() > kManyBars;
  const double pitch = many ? 15 : 28, height = many ? 11 : 18;
  double most = 0;
  for (const Bar& bar : chart.bars) most = std::max(most, sum_of(bar));
  const double scale = most > 0 ? (kRight - kLeft) / most : 0;
  Markup out;
  open_figure(out, {chart.id, chart.title, chart.note, description_of(chart)},
              kTop + pitch * static_cast<double>(chart.bars.size()) + 4);
  double y = kTop;
  for (const Bar& bar : chart.bars) {
    draw_bar(out, chart, bar, y, height, scale);
    y += pitch;
  }
  out.close("svg");
  draw_legend(out, chart);
  out.close("figure");
  return out.str();
}

}  // namespace moebius
