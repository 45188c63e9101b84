#include "cli/parse/option_hint.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <nlohmann/json.hpp>

#include "config/nearest.h"
#include "config/other_names.h"
#include "config/recipe/table.h"
#include "config/recipe/text.h"
#include "core/error.h"

namespace moebius {
namespace {

// Returns the value, quoted for a shell if necessary. A value that has a quote itself is not repeated.
std::string as_word(const std::string& value) {
  if (value.find('\'') != std::string::npos) return "VALUE";
  const bool is_plain = std::all_of(value.begin(), value.end(), [](unsigned char c) {
    return std::isalnum(c) || std::string_view("_-+./:,").find(static_cast<char>(c)) != std::string_view::npos;
  });
  return is_plain ? value : "'" + value + "'";
}

bool takes(const RecipeKey& key, const std::string& value) {
  try {
    return key.rule.accepts(read_override(key.name + "=" + value).value);
  } catch (const Error&) {
    return false;
  }
}

std::string assignment(const RecipeKey& key, const std::string& value) {
  const std::string shown = !value.empty() && takes(key, value) ? as_word(value)
                            : key.rule.accepts(true)            ? "true"
                                                                : "VALUE";
  return fmt::format("--set {}={}", key.name, shown);
}

}  // namespace

std::string option_hint(const UnknownOption& unknown) {
  if (!unknown.option.starts_with("--")) return "";
  const size_t equals = unknown.option.find('=');
  std::string name = unknown.option.substr(0, equals).substr(2);
  std::vector<std::string> options;
  for (const std::string& option : unknown.options) options.push_back(option.substr(2));
  std::string near = options.empty() ? "" : nearest_if_near(name, options);
  if (!near.empty()) near = "--" + near;
  std::replace(name.begin(), name.end(), '-', '_');
  const std::string value = equals == std::string::npos ? unknown.next : unknown.option.substr(equals + 1);
  std::vector<std::string> assignments;
  for (const RecipeKey& key : recipe_table()) {
    const bool is_meant = key.name == name || key.name.ends_with("." + name);
    const bool is_taken = unknown.sets == UnknownOption::Sets::recipe ||
                          (unknown.sets == UnknownOption::Sets::layout && section_of(key.name) == "parallel");
    if (is_meant && is_taken) assignments.push_back(assignment(key, value));
  }
  if (!near.empty()) {
    assignments.insert(assignments.begin(), near);
    return fmt::format("; did you mean {}?", fmt::join(assignments, " or "));
  }
  if (!assignments.empty()) return fmt::format("; a key of the recipe is set with {}", fmt::join(assignments, " or "));
  const std::string other = unknown.sets == UnknownOption::Sets::recipe ? other_name_hint(name) : "";
  return other.empty() ? "" : other + "; --set SECTION.KEY=VALUE sets a key of the recipe";
}

}  // namespace moebius
