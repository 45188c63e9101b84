#include "config/recipe/value_rule.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace moebius {

using nlohmann::json;

namespace {

ValueRule number_rule(std::string expects, std::function<bool(double)> accepts) {
  return {std::move(expects), [accepts = std::move(accepts)](const json& v) {
            return v.is_number() && std::isfinite(v.get<double>()) && accepts(v.get<double>());
          }};
}

// An unsigned value above int64 must not wrap into the range.
bool fits_int64(const json& v) {
  return v.is_number_integer() && (!v.is_number_unsigned() || v.get<uint64_t>() <= static_cast<uint64_t>(INT64_MAX));
}

}  // namespace

ValueRule any_boolean() {
  return {"true or false", [](const json& v) { return v.is_boolean(); }};
}
ValueRule any_text() {
  return {"a string", [](const json& v) { return v.is_string(); }};
}
ValueRule any_table() {
  return {"a table", [](const json& v) { return v.is_object(); }};
}

ValueRule integer_in(int64_t min, int64_t max) {
  return {fmt::format("a whole number from {} to {}", min, max),
          [min, max](const json& v) { return fits_int64(v) && v.get<int64_t>() >= min && v.get<int64_t>() <= max; }};
}
ValueRule positive_count() { return integer_in(1, kMaxCount); }
ValueRule count_or_zero() { return integer_in(0, kMaxCount); }

ValueRule number_above(double bound) {
  return number_rule(fmt::format("a finite number above {}", bound), [bound](double v) { return v > bound; });
}
ValueRule number_at_least(double bound) {
  return number_rule(fmt::format("a finite number of at least {}", bound), [bound](double v) { return v >= bound; });
}
ValueRule number_in(double min, double below) {
  return number_rule(fmt::format("a number of at least {} and below {}", min, below),
                     [min, below](double v) { return v >= min && v < below; });
}

ValueRule float_above_zero() {
  return number_rule(fmt::format("a finite number above 0, from {} to {}", kMinFloat, kMaxFloat),
                     [](double v) { return v >= kMinFloat && v <= kMaxFloat; });
}
ValueRule float_or_zero(double max) {
  return number_rule(fmt::format("a finite number of at least 0: 0, or from {} to {}", kMinFloat, max),
                     [max](double v) { return v == 0 || (v >= kMinFloat && v <= max); });
}
ValueRule float_in_unit() {
  return number_rule(
      fmt::format("a number of at least 0 and below 1: 0, or from {} to the last before 1 in f32", kMinFloat),
      [](double v) { return v == 0 || (v >= kMinFloat && static_cast<float>(v) < 1.0f); });
}

ValueRule one_of(std::vector<std::string> names) {
  std::string expects = fmt::format("\"{}\"", fmt::join(names, "\" or \""));
  return {std::move(expects), [names = std::move(names)](const json& v) {
            return v.is_string() && std::find(names.begin(), names.end(), v.get<std::string>()) != names.end();
          }};
}

std::string shown(const json& value) {
  constexpr size_t kLongest = 80;
  if (value.is_number_float() && !std::isfinite(value.get<double>())) return fmt::format("{}", value.get<double>());
  const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  return text.size() <= kLongest ? text : text.substr(0, kLongest) + "...";
}

}  // namespace moebius
