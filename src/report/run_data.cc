#include "report/run_data.h"

#include <algorithm>
#include <charconv>

namespace moebius {

Series* NamedSeries::find_or_add(std::string_view name, size_t& at) {
  if (at >= all_.size() || all_[at].first != name) {
    const auto is_it = [&](const auto& each) { return each.first == name; };
    at = static_cast<size_t>(std::find_if(all_.begin(), all_.end(), is_it) - all_.begin());
  }
  if (at == all_.size()) {
    if (all_.size() == kMax) return nullptr;
    all_.emplace_back(std::string(name), Series());
  }
  return &all_[at++].second;
}

const Series* NamedSeries::find(std::string_view name) const {
  for (const auto& [key, series] : all_)
    if (key == name) return series.empty() ? nullptr : &series;
  return nullptr;
}

const RunEvent* newest_event(const RunData& run, std::string_view kind) {
  for (auto event = run.events.rbegin(); event != run.events.rend(); ++event)
    if (event->kind == kind) return &*event;
  return nullptr;
}

std::string recipe_value(const RunData& run, std::string_view key) {
  for (const auto& [name, value] : run.recipe)
    if (name == key) return value;
  return "";
}

std::optional<double> recipe_number(const RunData& run, std::string_view key) {
  const std::string text = recipe_value(run, key);
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return value;
}

}  // namespace moebius
