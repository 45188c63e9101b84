// The section about routers and experts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "report/plot/heat_map.h"
#include "report/plot/line_plot.h"
#include "report/sections.h"

namespace moebius {
namespace {

constexpr int64_t kRecentColumns = 8;

std::vector<std::string> layer_names(const MoeData& moe) {
  std::vector<std::string> names;
  for (const int64_t layer : moe.layers) names.push_back(std::to_string(layer));
  return names;
}

std::vector<std::string> counted_names(int64_t n) {
  std::vector<std::string> names;
  for (int64_t i = 0; i < n; ++i) names.push_back(std::to_string(i));
  return names;
}

// Returns the largest mean of all runs: maps of one kind have the same scale on a page, so that runs can be compared.
double greatest_mean(const Grid& grid) {
  double most = 0;
  for (const GridColumn& column : grid.columns())
    for (int64_t row = 0; row < std::ssize(column.counts); ++row)
      most = std::max(most, column.mean(row));  // NaN is not greater
  return most;
}

// Returns the lower end of the scale, relative to ln(experts), in steps of 5 %, so that small differences are visible.
double min_entropy(const MoeData& moe) {
  double low = 0.99;
  if (moe.experts < 2) return low;
  for (const GridColumn& column : moe.entropy.columns())
    for (int64_t row = 0; row < std::ssize(column.counts); ++row)
      low = std::min(low, column.counts[row] > 0 ? column.mean(row) / std::log(static_cast<double>(moe.experts)) : low);
  return std::max(0.0, std::floor(low * 20) / 20);
}

std::string balance_map(const Runs& runs, const ShownRun& run) {
  HeatMap map = heat_of_grid(run.data.moe.balance, layer_names(run.data.moe));
  map.id = id_of("balance", run);
  map.title = "Busiest expert of each layer" + of_run(runs, run);
  map.note = "its tokens over the mean of its layer; 1 is perfect balance";
  map.row = "layer";
  map.scale = HeatScale::rising_log;
  map.low = 1;
  map.high = 2;
  for (const ShownRun& each : runs) map.high = std::max(map.high, greatest_mean(each.data.moe.balance));
  map.after = " times the mean";
  return figure_of(map);
}

// Returns the layer, as a row of `balance`, whose recent load was the least even.
int64_t least_even_layer(const MoeData& moe) {
  int64_t at = 0;
  for (int64_t r = 0; r < std::ssize(moe.layers); ++r)
    if (moe.balance.recent_mean(r, kRecentColumns) > moe.balance.recent_mean(at, kRecentColumns)) at = r;
  return at;
}

HeatMap load_map(const std::string& id) {
  HeatMap map{.id = id};
  map.scale = HeatScale::around_one;
  map.after = " times the mean";
  map.note = "tokens over the mean of the layer; orange is more, blue is less";
  return map;
}

std::string load_by_layer(const Runs& runs, const ShownRun& run) {
  const MoeData& moe = run.data.moe;
  HeatMap map = load_map(id_of("load", run));
  map.title = "Load of each expert in the last steps" + of_run(runs, run);
  map.row = "layer";
  map.column = "expert";
  map.rows = layer_names(moe);
  map.columns = counted_names(moe.experts);
  for (int64_t row = 0; row < std::ssize(moe.layers) * moe.experts; ++row)
    map.values.push_back(moe.load.recent_mean(row, kRecentColumns));
  return figure_of(map);
}

// Returns the experts of one layer over steps.
std::string load_over_steps(const Runs& runs, const ShownRun& run) {
  const MoeData& moe = run.data.moe;
  const int64_t layer = least_even_layer(moe), E = moe.experts;
  HeatMap all = heat_of_grid(moe.load, counted_names(E * std::ssize(moe.layers)));
  HeatMap map = load_map(id_of("load-steps", run));
  map.title = fmt::format("Load of layer {}{}", moe.layers[layer], of_run(runs, run));
  map.note = std::ssize(moe.layers) > 1
                 ? "the least even layer in the last steps; tokens of each expert over their mean"
                 : map.note;
  map.row = "expert";
  map.column = "step";
  map.rows = counted_names(E);
  map.steps = all.steps;
  const int64_t columns = std::ssize(all.steps);
  map.values.assign(all.values.begin() + layer * E * columns, all.values.begin() + (layer + 1) * E * columns);
  return figure_of(map);
}

std::string entropy_map(const Runs& runs, const ShownRun& run) {
  const MoeData& moe = run.data.moe;
  if (moe.experts < 2) return "";
  HeatMap map = heat_of_grid(moe.entropy, layer_names(moe));
  for (double& value : map.values) value /= std::log(static_cast<double>(moe.experts));
  map.id = id_of("entropy", run);
  map.title = "Router entropy" + of_run(runs, run);
  map.note = fmt::format("of the scores of a token, over ln {}; 100 % is no preference for any expert", moe.experts);
  map.row = "layer";
  map.unit = Unit::ratio;
  map.low = 1;
  for (const ShownRun& each : runs) map.low = std::min(map.low, min_entropy(each.data.moe));
  return figure_of(map);
}

std::string curve_of(const Runs& runs, const char* key, const char* title, const char* note, Unit unit) {
  LinePlot plot{.id = std::string("plot-") + key, .title = title, .note = note, .unit = unit};
  for (const ShownRun& run : runs)
    if (const Series* series = run.data.train.find(key); series && series->max() > 0)
      plot.lines.push_back({.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = series});
  return plot.lines.empty() ? "" : figure_of(plot);
}

bool has_moe(const ShownRun& run) { return !run.data.moe.layers.empty(); }

// Draws maps of one kind side by side, one for each run.
std::string for_each_run(const Runs& runs, std::string (*draw)(const Runs&, const ShownRun&)) {
  std::string figures;
  for (const ShownRun& run : runs)
    if (has_moe(run)) figures += draw(runs, run);
  return figures;
}

}  // namespace

std::string experts_section(const Runs& runs) {
  std::string figures = curve_of(runs, "expert_load_max_over_mean", "Balance",
                                 "busiest expert over the mean, averaged over layers; 1 is perfect", Unit::plain);
  figures += for_each_run(runs, balance_map);
  figures += for_each_run(runs, [](const Runs& all, const ShownRun& run) {
    return run.data.moe.experts > 0 ? load_by_layer(all, run) : "";
  });
  figures += for_each_run(runs, [](const Runs& all, const ShownRun& run) {
    return run.data.moe.experts > 0 ? load_over_steps(all, run) : "";
  });
  figures += for_each_run(runs, entropy_map);
  figures += curve_of(runs, "dropped_tokens", "Dropped tokens", "pairs of token and expert over capacity, per step",
                      Unit::count);
  figures +=
      curve_of(runs, "spilled_rows", "Spilled rows", "rows of experts beyond their budget, per step", Unit::count);
  figures += curve_of(runs, "spill_time_s", "Time of spills", "per step", Unit::seconds);
  figures += curve_of(runs, "expert_rows_peak_over_budget", "Rows of experts",
                      "the most rows that a rank kept, as a multiple of its budget", Unit::ratio);
  return section_of("Experts", figures);
}

}  // namespace moebius
