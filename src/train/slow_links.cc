#include "train/slow_links.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>

#include "memory/plan.h"

namespace moebius {
namespace {

// Returns the lower of the two middle values, so that the median is fast even if half of the connections are slow; 0
// without values.
double lower_median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + (std::ssize(values) - 1) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// Fills the three columns of one measurement. is_slower orders the candidates.
void put_slowest(double* columns, const std::vector<const LinkMeasurement*>& all, double LinkMeasurement::*figure,
                 const std::function<bool(const LinkMeasurement&)>& may_be_slowest,
                 const std::function<bool(double, double)>& is_slower) {
  const LinkMeasurement* slowest = nullptr;
  for (const LinkMeasurement* link : all)
    if (link->*figure > 0 && may_be_slowest(*link) && (!slowest || is_slower(link->*figure, slowest->*figure)))
      slowest = link;
  std::vector<double> others;
  for (const LinkMeasurement* link : all)
    if (link != slowest && link->*figure > 0) others.push_back(link->*figure);
  columns[0] = slowest ? slowest->peer : -1;
  columns[1] = slowest ? slowest->*figure : 0;
  columns[2] = lower_median(std::move(others));
}

SlowLink slowest_of(std::span<const LinkRow> rows, int first, const std::function<bool(double, double)>& is_slower) {
  SlowLink slow;
  for (int r = 0; r < std::ssize(rows); ++r) {
    const double peer = rows[r][first], value = rows[r][first + 1];
    if (peer < 0 || (slow.is_known() && !is_slower(value, slow.value))) continue;
    slow.rank = std::min(r, static_cast<int>(peer));
    slow.peer = std::max(r, static_cast<int>(peer));
    slow.value = value;
  }
  std::vector<double> others;
  for (int r = 0; r < std::ssize(rows); ++r) {
    const int peer = static_cast<int>(rows[r][first]);
    const bool is_it = std::min(r, peer) == slow.rank && std::max(r, peer) == slow.peer;
    if (peer >= 0 && !is_it) others.push_back(rows[r][first + 1]);
    if (rows[r][first + 2] > 0) others.push_back(rows[r][first + 2]);
  }
  slow.median_of_others = lower_median(std::move(others));
  return slow;
}

nlohmann::ordered_json to_json(const SlowLink& link, bool is_slow) {
  nlohmann::ordered_json json{
      {"ranks", {link.rank, link.peer}}, {"hosts", {link.host, link.peer_host}}, {"value", link.value}};
  if (link.median_of_others > 0) json["median_of_others"] = link.median_of_others;
  json["slow"] = is_slow;
  return json;
}

std::string time_text(double seconds) { return fmt::format("{:.3g} ms", seconds * 1e3); }
std::string rate_text(double bytes_per_s) { return bytes_text(static_cast<int64_t>(bytes_per_s)) + "/s"; }

std::string text_of(const SlowLink& link, const char* what, const std::function<std::string(double)>& text) {
  const auto end = [](int rank, const std::string& host) {
    return fmt::format("rank {}{}", rank, host.empty() ? "" : fmt::format(" ({})", host));
  };
  return fmt::format(
      "{} to {} has {} of {}{}", end(link.rank, link.host), end(link.peer, link.peer_host), what, text(link.value),
      link.median_of_others > 0 ? fmt::format(", the median of the others is {}", text(link.median_of_others)) : "");
}

}  // namespace

bool is_slow_round_trip(const SlowLink& l) {
  return l.is_known() && l.median_of_others > 0 && l.value >= kSlowRoundTripS &&
         l.value >= kSlowTimes * l.median_of_others;
}
bool is_slow_rate(const SlowLink& l) {
  return l.is_known() && l.median_of_others > 0 && l.value * kSlowTimes <= l.median_of_others;
}

LinkRow link_row(std::span<const LinkMeasurement> links) {
  const bool crosses =
      std::any_of(links.begin(), links.end(), [](const LinkMeasurement& l) { return l.crosses_machines; });
  std::vector<const LinkMeasurement*> all;
  for (const LinkMeasurement& link : links)
    if (link.crosses_machines == crosses) all.push_back(&link);
  LinkRow row{};
  put_slowest(
      row.data(), all, &LinkMeasurement::round_trip_s, [](const LinkMeasurement&) { return true; }, std::greater());
  put_slowest(
      row.data() + 3, all, &LinkMeasurement::bytes_per_s, [](const LinkMeasurement& l) { return l.is_filled; },
      std::less());
  return row;
}

SlowLinks slowest_links(std::span<const LinkRow> rows) {
  return {.round_trip = slowest_of(rows, 0, std::greater()), .rate = slowest_of(rows, 3, std::less())};
}

void name_hosts(SlowLinks& links, const std::vector<std::string>& hosts) {
  for (SlowLink* link : {&links.round_trip, &links.rate}) {
    if (!link->is_known()) continue;
    link->host = hosts[link->rank];
    link->peer_host = hosts[link->peer];
  }
}

nlohmann::ordered_json to_json(const SlowLinks& links) {
  nlohmann::ordered_json json;
  if (links.round_trip.is_known())
    json["round_trip_s"] = to_json(links.round_trip, is_slow_round_trip(links.round_trip));
  if (links.rate.is_known()) json["bytes_per_s"] = to_json(links.rate, is_slow_rate(links.rate));
  return json;
}

std::string slow_links_text(const SlowLinks& links, bool only_slow) {
  std::string text;
  if (links.round_trip.is_known() && (!only_slow || is_slow_round_trip(links.round_trip)))
    text = text_of(links.round_trip, "a round trip", time_text);
  if (links.rate.is_known() && (!only_slow || is_slow_rate(links.rate)))
    text += (text.empty() ? "" : "; ") + text_of(links.rate, "a rate", rate_text);
  return text;
}

}  // namespace moebius
