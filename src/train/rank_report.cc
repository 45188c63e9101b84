#include "train/rank_report.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "device/fallback_kernels.h"

namespace moebius {
namespace {

constexpr int64_t kLinks = 4 + 2 * kNumAxes;  // the first column of the links
constexpr int64_t kColumns = kLinks + kLinkColumns + 1;

std::array<double, kColumns> row_of(const RankTimes& mine, const CommCounters& comm) {
  std::array<double, kColumns> row{mine.load_s, mine.passes_s, mine.optimizer_s};
  for (int a = 0; a < kNumAxes; ++a) {
    row[4 + a] = comm.sent_bytes[a];
    row[4 + kNumAxes + a] = comm.seconds[a];
    row[3] += comm.seconds[a];
  }
  const LinkRow links = link_row(comm.links);
  std::copy(links.begin(), links.end(), row.begin() + kLinks);
  return row;
}

std::vector<double> column_of(const std::vector<double>& table, int64_t column) {
  std::vector<double> values;
  for (size_t at = static_cast<size_t>(column); at < table.size(); at += kColumns) values.push_back(table[at]);
  return values;
}

AxisReport axis_report(const std::vector<double>& table, int a) {
  const std::vector<double> bytes = column_of(table, 4 + a), seconds = column_of(table, 4 + kNumAxes + a);
  return {.axis = static_cast<Axis>(a),
          .sent_bytes = *std::max_element(bytes.begin(), bytes.end()),
          .exposed_s = *std::max_element(seconds.begin(), seconds.end()),
          .rank_s = seconds};
}

// Returns seconds to the microsecond, so that the records of many ranks are short.
double to_microsecond(double seconds) { return std::round(seconds * 1e6) / 1e6; }

std::vector<double> to_microsecond(std::vector<double> seconds) {
  for (double& each : seconds) each = to_microsecond(each);
  return seconds;
}

// Experts are blocks of equal size over the ranks of ep.
std::vector<int64_t> tokens_of_ep_ranks(const std::vector<MoeLayerReport>& layers, int64_t ep) {
  std::vector<int64_t> tokens(layers.empty() ? 0 : ep);
  for (const MoeLayerReport& layer : layers) {
    const int64_t here = std::ssize(layer.load) / ep;
    for (int64_t e = 0; e < std::ssize(layer.load); ++e) tokens[e / here] += layer.load[e];
  }
  return tokens;
}

}  // namespace

void warn_of_fallback_kernels(Log& log, Control& control, const Engine& engine) {
  const std::vector<std::string> said = control.gather(engine.fallback_kernels_text());
  if (!control.is_root()) return;
  for (const std::string& text : fallback_kernels_of_ranks(said)) log.warn("{}", text);
}

CommCounters comm_counters(const Mesh& mesh) {
  CommCounters counters;
  for (int a = 0; a < kNumAxes; ++a) {
    counters.sent_bytes[a] = static_cast<double>(mesh.sent_bytes(static_cast<Axis>(a)));
    counters.seconds[a] = mesh.seconds(static_cast<Axis>(a));
  }
  return counters;
}

CommCounters comm_since(const Mesh& mesh, const CommCounters& before) {
  CommCounters counters = comm_counters(mesh);
  for (int a = 0; a < kNumAxes; ++a) {
    counters.sent_bytes[a] -= before.sent_bytes[a];
    counters.seconds[a] -= before.seconds[a];
  }
  return counters;
}

RanksReport gather_ranks(Engine& engine, const RankTimes& mine, const CommCounters& comm,
                         const std::vector<MoeLayerReport>& layers, int64_t outcome) {
  RanksReport report;
  report.outcome = outcome;
  Group& world = engine.mesh().group(Axis::world);
  if (world.size() == 1) {
    report.ranks.push_back(mine);
    return report;
  }
  report.tokens_of_ep_rank = tokens_of_ep_ranks(layers, engine.mesh().shape().ep);
  std::array<double, kColumns> row = row_of(mine, comm);
  row[kColumns - 1] = static_cast<double>(outcome);
  std::vector<double> table(kColumns * world.size());
  ThreadPool& pool = engine.stream().pool();
  Stream s(DeviceKind::cpu, pool);
  world.all_gather(s, tensor_of(table.data(), {std::ssize(table)}), tensor_of(row.data(), {kColumns}));
  std::vector<LinkRow> links(world.size());
  for (int r = 0; r < world.size(); ++r) {
    const double* of = table.data() + r * kColumns;
    std::copy_n(of + kLinks, kLinkColumns, links[r].begin());
    report.ranks.push_back({.load_s = of[0], .passes_s = of[1], .optimizer_s = of[2], .waiting_s = of[3]});
    report.outcome = std::max(report.outcome, static_cast<int64_t>(of[kColumns - 1]));
  }
  report.slow_links = slowest_links(links);
  for (int a = 0; a < kNumAxes; ++a) {
    if (engine.mesh().group(static_cast<Axis>(a)).size() > 1) report.axes.push_back(axis_report(table, a));
  }
  return report;
}

nlohmann::ordered_json to_json(const RanksReport& report) {
  nlohmann::ordered_json json, ranks, axes;
  const auto column = [&](const char* name, double RankTimes::*value) {
    for (const RankTimes& rank : report.ranks) ranks[name].push_back(to_microsecond(rank.*value));
  };
  column("load_s", &RankTimes::load_s);
  column("passes_s", &RankTimes::passes_s);
  column("optimizer_s", &RankTimes::optimizer_s);
  column("waiting_s", &RankTimes::waiting_s);
  for (const AxisReport& axis : report.axes) {
    if (axis.sent_bytes == 0 && axis.exposed_s == 0) continue;
    axes[std::string(name_of(axis.axis))] = {{"sent_bytes", static_cast<int64_t>(axis.sent_bytes)},
                                             {"exposed_s", to_microsecond(axis.exposed_s)},
                                             {"rank_s", to_microsecond(axis.rank_s)}};
  }
  json["ranks"] = ranks;
  if (report.host_link_bytes_per_s) json["host_link_bytes_per_s"] = *report.host_link_bytes_per_s;
  if (report.ranks.size() == 1) return json;
  json["comm"] = axes;
  if (nlohmann::ordered_json links = to_json(report.slow_links); !links.is_null()) json["links"] = std::move(links);
  json["tokens_of_ep_rank"] = report.tokens_of_ep_rank;
  return json;
}

std::string comm_text(const RanksReport& report) {
  std::string text;
  for (const AxisReport& axis : report.axes) {
    if (axis.sent_bytes == 0) continue;
    text += fmt::format("{}{} {} {:.1f} ms", text.empty() ? "" : ", ", name_of(axis.axis),
                        bytes_text(static_cast<int64_t>(axis.sent_bytes)), axis.exposed_s * 1e3);
  }
  return text;
}

}  // namespace moebius
