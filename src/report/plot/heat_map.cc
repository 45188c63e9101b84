#include "report/plot/heat_map.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "report/plot/axis.h"
#include "report/plot/figure.h"
#include "report/plot/markup.h"

namespace moebius {
namespace {

constexpr double kLeft = 46, kRight = 392, kTop = 8;
constexpr int kRising = 10, kAround = 11;  // colours of a scale
constexpr double kRowApart = 15;           // between names of rows

double height_of(const HeatMap& map) { return std::clamp(static_cast<double>(map.rows.size()) * 14.0, 126.0, 140.0); }

// Returns the number of a value's colour; -1 for none.
int colour_of(const HeatMap& map, double value) {
  if (!std::isfinite(value)) return -1;
  if (map.scale == HeatScale::around_one) {
    const double octaves = value > 0 ? std::log2(value) : -10;
    return static_cast<int>(std::lround(std::clamp(octaves, -1.0, 1.0) * 5)) + 5;
  }
  double part = map.high > map.low ? (value - map.low) / (map.high - map.low) : 0;
  if (map.scale == HeatScale::rising_log)
    part = std::log(std::max(value, map.low) / map.low) / std::log(map.high / map.low);
  return static_cast<int>(std::clamp(part, 0.0, 0.999) * kRising);
}

const char* family_of(const HeatMap& map) { return map.scale == HeatScale::around_one ? "d" : "s"; }
int colours_of(const HeatMap& map) { return map.scale == HeatScale::around_one ? kAround : kRising; }

// Draws one path per colour; adjacent cells of one colour in a row are one rectangle.
void draw_cells(Markup& out, const HeatMap& map, int64_t num_columns, double height) {
  std::array<std::string, kAround> paths;
  const double w = (kRight - kLeft) / static_cast<double>(num_columns),
               h = height / static_cast<double>(map.rows.size());
  for (int64_t r = 0; r < std::ssize(map.rows); ++r) {
    for (int64_t c = 0, end = 0; c < num_columns; c = end) {
      const int colour = colour_of(map, map.values[r * num_columns + c]);
      for (end = c + 1; end < num_columns && colour_of(map, map.values[r * num_columns + end]) == colour;) ++end;
      if (colour < 0) continue;
      paths[colour] += fmt::format("M{:.2f} {:.2f}h{:.2f}v{:.2f}h-{:.2f}z", kLeft + static_cast<double>(c) * w,
                                   kTop + static_cast<double>(r) * h, static_cast<double>(end - c) * w, h,
                                   static_cast<double>(end - c) * w);
    }
  }
  out.open("g", {{"class", "cells"}});
  for (int i = 0; i < colours_of(map); ++i)
    if (!paths[i].empty()) out.leaf("path", {{"class", fmt::format("{}{}", family_of(map), i)}, {"d", paths[i]}});
  out.close("g");
}

void draw_row_names(Markup& out, const HeatMap& map, double height) {
  const double h = height / static_cast<double>(map.rows.size());
  const auto by = static_cast<size_t>(std::max(1.0, std::ceil(kRowApart / h)));
  for (size_t r = 0; r < map.rows.size(); r += by) {
    const double y = kTop + (static_cast<double>(r) + 0.5) * h;
    out.element("text", {{"x", place_text(kLeft - 8)}, {"y", place_text(y + 4)}, {"text-anchor", "end"}},
                truncated(map.rows[r], 6));
  }
}

// Returns the position of a step among columns that have several steps each.
double place_of_step(const HeatMap& map, int64_t step, double column_width) {
  size_t c = 0;
  while (c + 1 < map.steps.size() && map.steps[c + 1].first <= step) ++c;
  const auto& [first, last] = map.steps[c];
  const double part =
      (static_cast<double>(step - first) + 0.5) / static_cast<double>(std::max<int64_t>(last - first, 0) + 1);
  return kLeft + (static_cast<double>(c) + std::clamp(part, 0.0, 1.0)) * column_width;
}

void draw_column_names(Markup& out, const HeatMap& map, int64_t num_columns, double y) {
  const double w = (kRight - kLeft) / static_cast<double>(num_columns);
  const auto name = [&](double x, const std::string& text) {
    out.element("text", {{"x", place_text(x)}, {"y", place_text(y)}, {"text-anchor", "middle"}}, text);
  };
  if (!map.steps.empty()) {
    for (const int64_t step : step_ticks(map.steps.front().first, map.steps.back().second, 4))
      name(place_of_step(map, step, w), step_text(step));
    return;
  }
  const auto by = std::max<int64_t>(1, (num_columns + 11) / 12);
  for (int64_t c = 0; c < num_columns; c += by) name(kLeft + (static_cast<double>(c) + 0.5) * w, map.columns[c]);
}

void draw_scale(Markup& out, const HeatMap& map, double y) {
  constexpr double kStep = 11;
  const int n = colours_of(map);
  const std::string low = map.scale == HeatScale::around_one ? "1/2" : number_text(map.low, map.unit),
                    high = map.scale == HeatScale::around_one ? "2" : number_text(map.high, map.unit);
  const double begin = kRight - n * kStep - 8.5 * static_cast<double>(high.size()) - 6;
  out.element("text", {{"x", place_text(begin - 6)}, {"y", place_text(y + 9)}, {"text-anchor", "end"}}, low);
  for (int i = 0; i < n; ++i)
    out.leaf("rect", {{"class", fmt::format("{}{}", family_of(map), i)},
                      {"x", place_text(begin + i * kStep)},
                      {"y", place_text(y)},
                      {"width", place_text(kStep)},
                      {"height", "10"}});
  out.element("text", {{"x", place_text(begin + n * kStep + 6)}, {"y", place_text(y + 9)}}, high);
  out.element("text", {{"x", place_text(kLeft)}, {"y", place_text(y + 9)}}, map.row + " by " + map.column);
}

std::string names_of(const std::vector<std::string>& names) {
  std::string list;
  for (const std::string& name : names) list.append(list.empty() ? "[" : ",").append(json_string(name));
  return list.empty() ? "[]" : list + "]";
}

std::string data_of(const HeatMap& map, double height) {
  std::string columns, values;
  for (const auto& [first, last] : map.steps)
    columns += fmt::format("{}[{},{}]", columns.empty() ? "" : ",", first, last);
  for (const double value : map.values)
    values.append(values.empty() ? "" : ",").append(std::isfinite(value) ? fmt::format("{:.3g}", value) : "null");
  static constexpr const char* kUnits[] = {"plain", "count", "bytes", "seconds", "ratio"};
  return fmt::format(
      "{{\"l\":{},\"r\":{},\"t\":{},\"b\":{},\"row\":{},\"column\":{},\"rows\":{},\"columns\":{},\"v\":[{}],\"unit\":\"{}\",\"after\":{}}}",
      kLeft, kRight, kTop, kTop + height, json_string(map.row), json_string(map.column), names_of(map.rows),
      map.steps.empty() ? names_of(map.columns) : "[" + columns + "]", values, kUnits[static_cast<int>(map.unit)],
      json_string(map.after));
}

std::string description_of(const HeatMap& map, int64_t num_columns) {
  double low = std::numeric_limits<double>::infinity(), high = -low;
  size_t at = 0;
  for (size_t i = 0; i < map.values.size(); ++i) {
    if (!std::isfinite(map.values[i])) continue;
    low = std::min(low, map.values[i]);
    if (map.values[i] > high) {
      high = map.values[i];
      at = i;
    }
  }
  if (high < low) return fmt::format("{} by {}; no values.", map.row, map.column);
  return fmt::format("{} by {}: from {} to {}{}, the greatest in {} {}.", map.row, map.column,
                     number_text(low, map.unit), number_text(high, map.unit), map.after, map.row,
                     map.rows[at / static_cast<size_t>(num_columns)]);
}

// Returns the mean over columns [begin, end) of a row; NaN without values.
double mean_of_row(const Grid& grid, int64_t row, int64_t begin, int64_t end) {
  double sum = 0, count = 0;
  for (int64_t i = begin; i < end; ++i) {
    const auto& column = grid.columns()[i];
    if (row >= std::ssize(column.counts)) continue;
    sum += column.sums[row];
    count += column.counts[row];
  }
  return count > 0 ? sum / count : std::numeric_limits<double>::quiet_NaN();
}

}  // namespace

HeatMap heat_of_grid(const Grid& grid, std::vector<std::string> row_names, int64_t max_columns) {
  HeatMap map{.column = "step", .rows = std::move(row_names)};
  const auto& from = grid.columns();
  const int64_t by = (std::ssize(from) + max_columns - 1) / max_columns;
  const int64_t rows = std::ssize(map.rows);
  std::vector<std::vector<double>> columns;
  for (int64_t c = 0; c < std::ssize(from); c += by) {
    const int64_t end = std::min(c + by, std::ssize(from));
    map.steps.emplace_back(from[c].first_step, from[end - 1].last_step);
    std::vector<double>& values = columns.emplace_back();
    for (int64_t r = 0; r < rows; ++r) values.push_back(mean_of_row(grid, r, c, end));
  }
  for (int64_t r = 0; r < rows; ++r)
    for (const auto& column : columns) map.values.push_back(column[r]);
  return map;
}

std::string figure_of(const HeatMap& map) {
  const int64_t num_columns = std::ssize(map.values) / std::ssize(map.rows);
  const double height = height_of(map), below = kTop + height;
  Markup out;
  open_figure(out, {map.id, map.title, map.note, description_of(map, num_columns)}, below + 54);
  draw_cells(out, map, num_columns, height);
  out.leaf("path", {{"class", "rule"}, {"d", fmt::format("M{} {}H{}V{}H{}z", kLeft, kTop, kRight, below, kLeft)}});
  draw_row_names(out, map, height);
  draw_column_names(out, map, num_columns, below + 18);
  draw_scale(out, map, below + 36);
  close_figure(out, data_of(map, height));
  return out.str();
}

}  // namespace moebius
