// The sections about memory, and about ranks and their communication.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "report/plot/bars.h"
#include "report/plot/heat_map.h"
#include "report/plot/line_plot.h"
#include "report/plot/markup.h"
#include "report/sections.h"

namespace moebius {
namespace {

constexpr int64_t kRecentColumns = 8;
constexpr size_t kMaxRankBars = 24, kMaxRankRows = 256;
constexpr double kStraggles = 1.05;  // busy time over the median from which a rank is marked

double number_of(const RunEvent& event, const std::string& key) {
  const auto found = event.numbers.find(key);
  return found == event.numbers.end() ? 0 : found->second;
}

// --- memory ---------------------------------------------------------------------------------------------------------

Bar predicted_bar(const RunEvent& start) {
  static constexpr const char* kLives[] = {"param",       "master", "grad",    "layer_grad", "optimizer",
                                           "state",       "batch",  "saved",   "rows",       "offload_even",
                                           "offload_odd", "comm",   "metrics", "stack"};
  Bar bar{.name = "predicted"};
  double rest = number_of(start, "memory_predicted_bytes");
  int colour = 0;
  for (const char* life : kLives) {
    const auto found = start.memory_bytes.find(life);
    if (found == start.memory_bytes.end() || !(found->second > 0)) continue;
    bar.parts.push_back({.name = life, .value = found->second, .colour = colour++ % 7});
    rest -= found->second;
  }
  if (rest > 0) bar.parts.push_back({.name = "outside the plan", .value = rest, .colour = 7});
  return bar;
}

std::string memory_bars(const Runs& runs, const ShownRun& run) {
  const RunEvent* start = newest_event(run.data, "start");
  const Series* peak = run.data.train.find("memory_peak_bytes");
  const double predicted = start ? number_of(*start, "memory_predicted_bytes") : 0;
  if (!(predicted >= 1)) return "";
  BarChart chart{
      .id = id_of("memory", run), .title = "Memory predicted and held" + of_run(runs, run), .unit = Unit::bytes};
  chart.note = "on the first rank's device; each part is a life of the memory plan";
  chart.bars.push_back(predicted_bar(*start));
  if (peak) {
    const double held = peak->last(), off = 100 * (held / predicted - 1);
    chart.bars.push_back({.name = "held",
                          .parts = {{.name = "peak", .value = held, .colour = 7}},
                          .note = fmt::format("{}, {:+.1f} %", number_text(held, Unit::bytes), off),
                          .is_warning = off > 3});
  }
  return figure_of(chart);
}

// --- ranks ----------------------------------------------------------------------------------------------------------

struct RankTime {
  int64_t rank = 0;
  double load_s = 0, passes_s = 0, optimizer_s = 0, waiting_s = 0;  // waiting is part of passes and optimizer
  std::vector<double> axis_s;                                       // waiting by axis, where it is known
  double compute_s() const { return std::max(0.0, passes_s + optimizer_s - waiting_s); }
  double busy_s() const { return load_s + compute_s(); }
};

double recent(const RanksData& ranks, const char* phase, int64_t rank) {
  const auto found = ranks.phases.find(phase);
  const double seconds = found == ranks.phases.end() ? 0 : found->second.recent_mean(rank, kRecentColumns);
  return std::isfinite(seconds) ? std::max(seconds, 0.0) : 0;
}

std::vector<RankTime> rank_times(const RanksData& ranks) {
  std::vector<RankTime> times;
  const int64_t num_ranks = std::ssize(ranks.busy_s.last());
  for (int64_t r = 0; r < num_ranks; ++r) {
    RankTime time{.rank = r,
                  .load_s = recent(ranks, "load_s", r),
                  .passes_s = recent(ranks, "passes_s", r),
                  .optimizer_s = recent(ranks, "optimizer_s", r),
                  .waiting_s = recent(ranks, "waiting_s", r)};
    for (const auto& [name, axis] : ranks.axes) {
      const double seconds = axis.rank_s.empty() ? 0 : axis.rank_s.recent_mean(r, kRecentColumns);
      if (!axis.rank_s.empty()) time.axis_s.push_back(std::isfinite(seconds) ? std::max(seconds, 0.0) : 0);
    }
    times.push_back(std::move(time));
  }
  return times;
}

double median_busy(const std::vector<RankTime>& times) {
  std::vector<double> busy;
  for (const RankTime& time : times) busy.push_back(time.busy_s());
  const int64_t middle = (std::ssize(busy) - 1) / 2;  // of two ranks the quicker one
  std::nth_element(busy.begin(), busy.begin() + middle, busy.end());
  return busy[middle];
}

Bar bar_of(const RanksData& ranks, const RankTime& time) {
  Bar bar{.name = fmt::format("rank {}", time.rank)};
  if (time.waiting_s == 0) {
    bar.parts = {{.name = "load", .value = time.load_s, .colour = 2},
                 {.name = "passes", .value = time.passes_s, .colour = 0},
                 {.name = "optimizer", .value = time.optimizer_s, .colour = 5}};
    return bar;
  }
  bar.parts = {{.name = "load", .value = time.load_s, .colour = 2},
               {.name = "compute", .value = time.compute_s(), .colour = 0}};
  if (time.axis_s.empty()) {
    bar.parts.push_back({.name = "waiting", .value = time.waiting_s, .colour = 1});
    return bar;
  }
  static constexpr int kColours[] = {1, 3, 4, 5, 6, 7};
  size_t at = 0;
  for (const auto& [name, axis] : ranks.axes) {
    if (axis.rank_s.empty()) continue;
    bar.parts.push_back(
        {.name = "waiting on " + name, .value = time.axis_s[at], .colour = kColours[at % std::size(kColours)]});
    ++at;
  }
  return bar;
}

std::string rank_bars(const Runs& runs, const ShownRun& run) {
  const RanksData& ranks = run.data.ranks;
  std::vector<RankTime> times = rank_times(ranks);
  if (times.empty()) return "";
  const double median = median_busy(times);
  std::stable_sort(times.begin(), times.end(),
                   [](const RankTime& a, const RankTime& b) { return a.busy_s() > b.busy_s(); });
  const RankTime busiest = times.front();
  const bool straggles = times.size() > 1 && median > 0 && busiest.busy_s() > kStraggles * median;
  BarChart chart{.id = id_of("ranks", run), .title = "Step time by rank" + of_run(runs, run), .unit = Unit::seconds};
  chart.note = times.size() == 1 ? "in the last steps"
                                 : "in the last steps; waiting is communication that does not overlap with computation";
  if (times.size() > kMaxRankBars) {
    chart.note += fmt::format("; the {} busiest of {} ranks", kMaxRankBars, times.size());
    times.resize(kMaxRankBars);
  }
  std::sort(times.begin(), times.end(), [](const RankTime& a, const RankTime& b) { return a.rank < b.rank; });
  for (const RankTime& time : times) {
    Bar bar = bar_of(ranks, time);
    if (straggles && time.rank == busiest.rank) {
      bar.note = fmt::format("straggler +{:.0f} %", 100 * (time.busy_s() / median - 1));
      bar.is_warning = true;
    }
    chart.bars.push_back(std::move(bar));
  }
  return figure_of(chart);
}

// A map over steps of each rank's busy time relative to the mean: it shows which rank is slow, and when.
std::string rank_map(const Runs& runs, const ShownRun& run) {
  const Grid& busy = run.data.ranks.busy_s;
  if (busy.rows() < 2 || busy.rows() > static_cast<int64_t>(kMaxRankRows)) return "";
  std::vector<std::string> names;
  for (int64_t r = 0; r < busy.rows(); ++r) names.push_back(std::to_string(r));
  HeatMap map = heat_of_grid(busy, std::move(names));
  const size_t columns = map.steps.size(), rows = map.rows.size();
  double most = 1;
  for (size_t c = 0; c < columns; ++c) {
    double sum = 0, count = 0;
    for (size_t r = 0; r < rows; ++r) {
      const double value = map.values[r * columns + c];
      if (!std::isfinite(value)) continue;
      sum += value;
      ++count;
    }
    for (size_t r = 0; r < rows; ++r) {
      double& value = map.values[r * columns + c];
      value = sum > 0 ? value * count / sum : std::nan("");
      if (std::isfinite(value)) most = std::max(most, value);
    }
  }
  map.id = id_of("busy", run);
  map.title = "Busy time of each rank" + of_run(runs, run);
  map.note = "load and compute over the mean of all ranks; a dark row is a straggler";
  map.row = "rank";
  map.scale = HeatScale::rising_log;
  map.low = 1;
  map.high = std::max(1.2, most);
  map.after = " times the mean";
  return figure_of(map);
}

std::string axis_table(const Runs& runs, const ShownRun& run) {
  if (run.data.ranks.axes.empty()) return "";
  Markup out;
  out.open("div", {{"class", "card"}, {"id", id_of("axes", run)}})
      .element("h3", {}, "Communication per step" + of_run(runs, run));
  out.element("p", {{"class", "note"}}, "bytes sent and time waited, each the maximum over ranks; means over the run");
  out.open("div", {{"class", "wide"}}).open("table").open("thead").open("tr").element("th", {{"scope", "col"}}, "axis");
  for (const char* head : {"sent", "waited", "longest wait"})
    out.element("th", {{"scope", "col"}, {"class", "num"}}, head);
  out.close("tr").close("thead").open("tbody");
  const auto mean = [](const Series& series) {
    double sum = 0;
    for (const SeriesBin& bin : series.bins()) sum += bin.sum;
    return sum / static_cast<double>(std::max<int64_t>(series.count(), 1));
  };
  for (const auto& [name, axis] : run.data.ranks.axes) {
    out.open("tr").element("th", {{"scope", "row"}}, name);
    out.element("td", {{"class", "num"}}, number_text(mean(axis.sent_bytes), Unit::bytes));
    out.element("td", {{"class", "num"}}, number_text(mean(axis.exposed_s), Unit::seconds));
    out.element("td", {{"class", "num"}},
                axis.exposed_s.empty() ? "none" : number_text(axis.exposed_s.max(), Unit::seconds));
    out.close("tr");
  }
  out.close("tbody").close("table").close("div").close("div");
  return out.str();
}

void add_link_row(Markup& out, const char* figure, const std::optional<LinkData>& link, Unit unit) {
  if (!link) return;
  const auto end = [](int64_t rank, const std::string& host) {
    return fmt::format("rank {}{}", rank, host.empty() ? "" : fmt::format(" ({})", host));
  };
  out.open("tr").element("th", {{"scope", "row"}}, figure);
  out.element("td", {}, end(link->rank, link->host) + " to " + end(link->peer, link->peer_host));
  out.element("td", {{"class", "num"}}, number_text(link->value, unit));
  out.element("td", {{"class", "num"}},
              link->median_of_others > 0 ? number_text(link->median_of_others, unit) : "unknown");
  out.element("td", {}, link->is_slow ? "slow link" : "");
  out.close("tr");
}

// Returns a table of the slowest connections, for which all ranks wait.
std::string link_table(const Runs& runs, const ShownRun& run) {
  const RanksData& ranks = run.data.ranks;
  if (!ranks.longest_round_trip && !ranks.lowest_rate) return "";
  Markup out;
  out.open("div", {{"class", "card"}, {"id", id_of("links", run)}})
      .element("h3", {}, "Slowest connections" + of_run(runs, run));
  out.element("p", {{"class", "note"}}, "in the last steps, against the median of the others");
  out.open("div", {{"class", "wide"}}).open("table").open("thead").open("tr");
  out.element("th", {{"scope", "col"}}, "figure").element("th", {{"scope", "col"}}, "connection");
  for (const char* head : {"value", "others"}) out.element("th", {{"scope", "col"}, {"class", "num"}}, head);
  out.element("th", {{"scope", "col"}}, "").close("tr").close("thead").open("tbody");
  add_link_row(out, "round trip", ranks.longest_round_trip, Unit::seconds);
  add_link_row(out, "bytes per second", ranks.lowest_rate, Unit::bytes);
  out.close("tbody").close("table").close("div").close("div");
  return out.str();
}

}  // namespace

std::string memory_section(const Runs& runs) {
  std::string figures;
  for (const ShownRun& run : runs) figures += memory_bars(runs, run);
  LinePlot plot{.id = "plot-memory_peak_bytes",
                .title = "Peak memory",
                .note = "so far, of the first rank",
                .unit = Unit::bytes,
                .from_zero = true};
  for (const ShownRun& run : runs)
    if (const Series* peak = run.data.train.find("memory_peak_bytes"))
      plot.lines.push_back({.name = runs.size() > 1 ? run.name : "", .colour = run.colour, .series = peak});
  if (!plot.lines.empty()) figures += figure_of(plot);
  return section_of("Memory", figures);
}

std::string ranks_section(const Runs& runs) {
  std::string figures;
  for (const ShownRun& run : runs)
    figures += rank_bars(runs, run) + rank_map(runs, run) + axis_table(runs, run) + link_table(runs, run);
  return section_of("Ranks and communication", figures);
}

}  // namespace moebius
