// The rule for a key's value: a test of a JSON value and its description. Recipes and config.json
// share the rules.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace moebius {

struct ValueRule {
  std::string expects;  // completes "KEY must be ..."
  std::function<bool(const nlohmann::json&)> accepts;
  // The hint for a value that is not accepted: "; did you mean ...?", or empty.
  std::function<std::string(const nlohmann::json&)> hint = {};
};

// Sizes and counts stop here, so that a product of two of them fits int64.
inline constexpr int64_t kMaxCount = 1'000'000'000;

ValueRule any_boolean();
ValueRule any_text();
ValueRule any_table();
ValueRule integer_in(int64_t min, int64_t max);
ValueRule positive_count();  // 1 .. kMaxCount
ValueRule count_or_zero();   // 0 .. kMaxCount
// Finite numbers; integers are numbers too.
ValueRule number_above(double bound);
ValueRule number_at_least(double bound);
ValueRule number_in(double min, double below);  // [min, below)
// The same for numbers that the step computes with in f32: 0, or of a magnitude that is far from
// the limits of f32.
inline constexpr double kMinFloat = 1e-37, kMaxFloat = 1e37;
ValueRule float_above_zero();                     // kMinFloat .. kMaxFloat
ValueRule float_or_zero(double max = kMaxFloat);  // 0, or kMinFloat .. max
ValueRule float_in_unit();                        // the same below 1, in f32 too
ValueRule one_of(std::vector<std::string> names);

// Returns the value in the form in which a user would write it, truncated if it is long.
std::string shown(const nlohmann::json& value);

}  // namespace moebius
