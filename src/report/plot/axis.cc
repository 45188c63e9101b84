#include "report/plot/axis.h"

#include <fmt/core.h>

#include <algorithm>
#include <cmath>

namespace moebius {
namespace {

// Returns the least of 1, 2, 5 times a power of ten that is not below `least`.
double round_step(double least) {
  const double power = std::pow(10, std::floor(std::log10(least)));
  for (const double factor : {1.0, 2.0, 5.0})
    if (factor * power >= least * (1 - 1e-9)) return factor * power;
  return 10 * power;
}

}  // namespace

double PlotAxis::at(double value) const {
  const auto scaled = [&](double v) { return is_log ? std::log(v) : v; };
  const double part =
      (scaled(std::max(value, is_log ? low * 1e-3 : value)) - scaled(low)) / (scaled(high) - scaled(low));
  return begin + std::clamp(part, -0.05, 1.05) * (end - begin);
}

PlotAxis value_axis(double low, double high, double usual) {
  PlotAxis axis;
  if (low > 0 && high >= 100 * usual) {
    axis.is_log = true;
    axis.low = std::pow(10, std::floor(std::log10(low) + 1e-9));
    axis.high = std::pow(10, std::ceil(std::log10(high) - 1e-9));
    if (axis.high <= axis.low) axis.high = 10 * axis.low;
    return axis;
  }
  const double size = std::max(std::abs(low), std::abs(high));
  if (high - low < 1e-9 * size || high == low) {
    const double room = size > 0 ? size * 0.1 : 1;
    low -= room;
    high += room;
  }
  const double step = round_step((high - low) / 4);
  axis.low = std::floor(low / step + 1e-9) * step;
  axis.high = std::ceil(high / step - 1e-9) * step;
  return axis;
}

std::vector<double> tick_values(const PlotAxis& axis, int about) {
  std::vector<double> marks;
  if (axis.is_log) {
    const double decades = std::round(std::log10(axis.high) - std::log10(axis.low));
    const double by = std::max(1.0, std::ceil(decades / about));
    for (double i = 0; i <= decades; i += by) marks.push_back(axis.low * std::pow(10, i));
    return marks;
  }
  const double step = round_step((axis.high - axis.low) / about);
  const double first = std::ceil(axis.low / step - 1e-9);
  for (int i = 0; i <= 4 * about; ++i) {
    const double value = (first + i) * step;
    if (value > axis.high + 1e-6 * step) break;
    marks.push_back(std::abs(value) < 1e-9 * step ? 0 : value);
  }
  return marks;
}

std::vector<int64_t> step_ticks(int64_t low, int64_t high, int about) {
  if (high <= low) return {low};
  const double range = static_cast<double>(high) - static_cast<double>(low);
  const auto step = static_cast<int64_t>(std::max(1.0, round_step(range / about)));
  std::vector<int64_t> marks;
  for (int64_t value = (low / step + (low % step > 0)) * step; value <= high; value += step) {
    marks.push_back(value);
    if (value > high - step) break;  // the next one might not be an int64
  }
  return marks;
}

std::string step_text(int64_t step) {
  if (std::abs(static_cast<double>(step)) < 1e4) return std::to_string(step);
  const auto text = [&](double unit, const char* name) {
    return fmt::format("{:.4g} {}", static_cast<double>(step) / unit, name);
  };
  if (step < 1'000'000) return text(1e3, "k");
  return step < 1'000'000'000 ? text(1e6, "M") : text(1e9, "G");
}

std::string place_text(double place) {
  std::string text = fmt::format("{:.1f}", place);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text == "-0" ? "0" : text;
}

}  // namespace moebius
