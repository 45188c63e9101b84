#include "report/plot/line_plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "report/plot/axis.h"
#include "report/plot/figure.h"
#include "report/plot/markup.h"

namespace moebius {
namespace {

constexpr double kHeight = 222, kLeft = 46, kTop = 10, kBottom = 194;
constexpr double kRight = 338;  // names are right of it
constexpr int64_t kMaxBins = 720;
constexpr size_t kMaxName = 9, kMaxMarks = 400;

struct Drawn {
  const PlotLine& line;
  std::vector<SeriesBin> bins;
  bool is_binned = false;  // some bins hold several records
};

struct Frame {
  PlotAxis x, y;
};

double middle_of(const SeriesBin& bin) {
  return (static_cast<double>(bin.first_step) + static_cast<double>(bin.last_step)) / 2;
}

std::vector<Drawn> drawn_lines(const LinePlot& plot) {
  std::vector<Drawn> drawn;
  for (const PlotLine& line : plot.lines) {
    Drawn each{.line = line, .bins = line.series->bins(kMaxBins)};
    for (const SeriesBin& bin : each.bins) each.is_binned = each.is_binned || bin.count > 1;
    drawn.push_back(std::move(each));
  }
  return drawn;
}

// Returns the median of the means, by which spikes are recognised.
double usual_of(const std::vector<Drawn>& drawn) {
  std::vector<double> means;
  for (const Drawn& each : drawn)
    for (const SeriesBin& bin : each.bins) means.push_back(std::abs(bin.mean()));
  std::nth_element(means.begin(), means.begin() + std::ssize(means) / 2, means.end());
  return means[means.size() / 2];
}

// Returns the unit for round numbers of bytes: 1, KiB, MiB, ...
double bytes_base(double bytes) {
  double base = 1;
  while (bytes >= 1024 * base && base < 1e15) base *= 1024;
  return base;
}

Frame frame_of(const LinePlot& plot, const std::vector<Drawn>& drawn) {
  double low = std::numeric_limits<double>::infinity(), high = -low, first = low, last = -low;
  for (const Drawn& each : drawn) {
    for (const SeriesBin& bin : each.bins) {
      low = std::min(low, bin.min);
      high = std::max(high, bin.max);
    }
    first = std::min(first, static_cast<double>(each.bins.front().first_step));
    last = std::max(last, static_cast<double>(each.bins.back().last_step));
  }
  if (plot.limit && *plot.limit <= 1.5 * high) high = std::max(high, *plot.limit);
  Frame frame;
  const double base = plot.unit == Unit::bytes ? bytes_base(high) : 1;
  frame.y = value_axis(low / base, high / base, usual_of(drawn) / base);
  if (plot.from_zero && !frame.y.is_log && low >= 0) frame.y = value_axis(0, high / base, high / base);
  frame.y.low *= base;
  frame.y.high *= base;
  frame.y.begin = kBottom;
  frame.y.end = kTop;
  frame.x = {.low = first, .high = last, .begin = kLeft, .end = kRight};
  if (first == last) frame.x = {.low = first - 1, .high = last + 1, .begin = kLeft, .end = kRight};
  return frame;
}

void draw_axes(Markup& out, const LinePlot& plot, const Frame& frame) {
  std::string rules;
  const double base = plot.unit == Unit::bytes ? bytes_base(frame.y.high) : 1;
  PlotAxis in_base = frame.y;
  in_base.low /= base;
  in_base.high /= base;
  for (const double mark : tick_values(in_base, 4)) {
    const double value = mark * base, y = in_base.at(mark);
    rules += fmt::format("M{} {}H{}", place_text(kLeft), place_text(y), place_text(kRight));
    out.element("text", {{"x", place_text(kLeft - 8)}, {"y", place_text(y + 4)}, {"text-anchor", "end"}},
                number_text(value, plot.unit));
  }
  out.leaf("path", {{"class", "rule"}, {"d", rules}});
  out.leaf("path", {{"class", "base"}, {"d", fmt::format("M{} {}H{}", kLeft, kBottom, kRight)}});
  constexpr double kLargest = 9.2e18;  // an int64
  const auto first = static_cast<int64_t>(std::min(frame.x.low, kLargest));
  const auto last = static_cast<int64_t>(std::min(frame.x.high, kLargest));
  for (const int64_t step : step_ticks(first, last, 4)) {
    const double x = frame.x.at(static_cast<double>(step));
    out.element("text", {{"x", place_text(x)}, {"y", place_text(kBottom + 20)}, {"text-anchor", "middle"}},
                step_text(step));
  }
  out.element("text", {{"x", place_text(kFigureWidth)}, {"y", place_text(kBottom + 20)}, {"text-anchor", "end"}},
              "step");
}

void draw_marks(Markup& out, const LinePlot& plot, const Frame& frame) {
  std::string restarts, saved;
  size_t num = 0;
  for (const StepMark& mark : plot.marks) {
    const auto step = static_cast<double>(mark.step);
    if (step < frame.x.low || step > frame.x.high || ++num > kMaxMarks) continue;
    const std::string x = place_text(frame.x.at(step));
    if (mark.is_restart)
      restarts += fmt::format("M{} {}V{}", x, kTop, kBottom);
    else
      saved += fmt::format("M{} {}l3 5h-6z", x, kBottom + 1);
  }
  if (!restarts.empty()) out.leaf("path", {{"class", "restart"}, {"d", restarts}});
  if (!saved.empty()) out.leaf("path", {{"class", "saved"}, {"d", saved}});
}

bool is_limit_shown(const LinePlot& plot, const Frame& frame) {
  return plot.limit && *plot.limit >= frame.y.low && *plot.limit <= frame.y.high;
}

void draw_limit(Markup& out, const LinePlot& plot, const Frame& frame) {
  if (!is_limit_shown(plot, frame)) return;
  const double y = frame.y.at(*plot.limit);
  out.leaf("path", {{"class", "limit"}, {"d", fmt::format("M{} {}H{}", kLeft, place_text(y), kRight)}});
}

std::string band_path(const Drawn& drawn, const Frame& frame) {
  std::string path;
  const auto add = [&](const SeriesBin& bin, double value) {
    path += fmt::format("{}{} {}", path.empty() ? "M" : "L", place_text(frame.x.at(middle_of(bin))),
                        place_text(frame.y.at(value)));
  };
  for (const SeriesBin& bin : drawn.bins) add(bin, bin.max);
  for (auto bin = drawn.bins.rbegin(); bin != drawn.bins.rend(); ++bin) add(*bin, bin->min);
  return path + "z";
}

std::string mean_path(const Drawn& drawn, const Frame& frame) {
  std::string path;
  for (const SeriesBin& bin : drawn.bins)
    path += fmt::format("{}{} {}", path.empty() ? "M" : "L", place_text(frame.x.at(middle_of(bin))),
                        place_text(frame.y.at(bin.mean())));
  return path;
}

void draw_line(Markup& out, const Drawn& drawn, const Frame& frame) {
  out.open("g", {{"class", fmt::format("c{}", drawn.line.colour)}});
  if (drawn.is_binned) out.leaf("path", {{"class", "band"}, {"d", band_path(drawn, frame)}});
  if (drawn.bins.size() > 1) out.leaf("path", {{"class", "line"}, {"d", mean_path(drawn, frame)}});
  const bool few = drawn.line.dots && drawn.bins.size() <= 60;
  for (const SeriesBin& bin : drawn.bins) {
    if (!few && drawn.bins.size() > 1) break;
    out.leaf("circle", {{"class", "dot"},
                        {"cx", place_text(frame.x.at(middle_of(bin)))},
                        {"cy", place_text(frame.y.at(bin.mean()))},
                        {"r", "3"}});
  }
  out.close("g");
}

struct EndName {
  double x = 0, y = 0;
  std::string text, style;
};

// Moves names up and down until none covers another. They stay inside the plot if there is enough space.
void move_apart(std::vector<EndName>& names) {
  constexpr double kApart = 14;
  std::sort(names.begin(), names.end(), [](const EndName& a, const EndName& b) { return a.y < b.y; });
  for (size_t i = 1; i < names.size(); ++i) names[i].y = std::max(names[i].y, names[i - 1].y + kApart);
  double lowest = kBottom - 2;
  for (auto name = names.rbegin(); name != names.rend(); ++name) {
    name->y = std::min(name->y, lowest);
    lowest = name->y - kApart;
  }
}

// The name of each line at its end, or its last value where it is the only line.
void draw_names(Markup& out, const LinePlot& plot, const std::vector<Drawn>& drawn, const Frame& frame) {
  std::vector<EndName> names;
  for (const Drawn& each : drawn) {
    const SeriesBin& end = each.bins.back();
    const std::string value = number_text(each.line.series->last(), plot.unit);
    const std::string text = drawn.size() == 1 ? value : truncated(each.line.name, kMaxName);
    if (!text.empty())
      names.push_back(
          {frame.x.at(middle_of(end)) + 7, frame.y.at(end.mean()), text, fmt::format("end c{}", each.line.colour)});
  }
  if (is_limit_shown(plot, frame)) names.push_back({kRight + 7, frame.y.at(*plot.limit), plot.limit_name, ""});
  move_apart(names);
  for (const EndName& name : names)
    out.element("text", {{"class", name.style}, {"x", place_text(name.x)}, {"y", place_text(name.y + 4)}}, name.text);
}

std::string description_of(const LinePlot& plot, const std::vector<Drawn>& drawn) {
  std::string text;
  for (const Drawn& each : drawn) {
    const Series& s = *each.line.series;
    text += fmt::format("{}{}{}{} at step {}, {} at step {}; least {}, greatest {}.", text.empty() ? "" : " ",
                        each.line.name, each.line.name.empty() ? "" : ": ",
                        number_text(each.bins.front().mean(), plot.unit), each.bins.front().first_step,
                        number_text(s.last(), plot.unit), s.last_step(), number_text(s.min(), plot.unit),
                        number_text(s.max(), plot.unit));
  }
  return text;
}

template <class Value>
std::string list_of(const std::vector<SeriesBin>& bins, Value&& value) {
  std::string list;
  for (const SeriesBin& bin : bins) list.append(list.empty() ? "[" : ",").append(value(bin));
  return list + "]";
}

std::string data_of(const LinePlot& plot, const std::vector<Drawn>& drawn, const Frame& frame) {
  static constexpr const char* kUnits[] = {"plain", "count", "bytes", "seconds", "ratio"};
  std::string lines;
  for (const Drawn& each : drawn) {
    lines += fmt::format("{}{{\"n\":{},\"c\":{},\"a\":{},\"m\":{}", lines.empty() ? "" : ",",
                         json_string(each.line.name), each.line.colour,
                         list_of(each.bins, [](const SeriesBin& b) { return std::to_string(b.first_step); }),
                         list_of(each.bins, [](const SeriesBin& b) { return digits_text(b.mean()); }));
    if (each.is_binned)
      lines += fmt::format(",\"b\":{},\"lo\":{},\"hi\":{}",
                           list_of(each.bins, [](const SeriesBin& b) { return std::to_string(b.last_step); }),
                           list_of(each.bins, [](const SeriesBin& b) { return digits_text(b.min); }),
                           list_of(each.bins, [](const SeriesBin& b) { return digits_text(b.max); }));
    lines += "}";
  }
  return fmt::format(
      "{{\"l\":{},\"r\":{},\"t\":{},\"b\":{},\"x\":[{},{}],\"y\":[{},{}],\"log\":{},\"unit\":\"{}\",\"lines\":[{}]}}",
      kLeft, kRight, kTop, kBottom, frame.x.low, frame.x.high, frame.y.low, frame.y.high, frame.y.is_log,
      kUnits[static_cast<int>(plot.unit)], lines);
}

}  // namespace

std::string figure_of(const LinePlot& plot) {
  const std::vector<Drawn> drawn = drawn_lines(plot);
  const Frame frame = frame_of(plot, drawn);
  Markup out;
  const std::string log_note = frame.y.is_log ? (plot.note.empty() ? "logarithmic" : "; logarithmic") : "";
  open_figure(out, {plot.id, plot.title, plot.note + log_note, description_of(plot, drawn)}, kHeight);
  draw_axes(out, plot, frame);
  draw_marks(out, plot, frame);
  draw_limit(out, plot, frame);
  for (const Drawn& each : drawn) draw_line(out, each, frame);
  draw_names(out, plot, drawn, frame);
  close_figure(out, data_of(plot, drawn, frame));
  return out.str();
}

}  // namespace moebius
