// The list of recipe keys. Parsing, range checks, printing, comparison and suggestions all use it.
#pragma once

#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "config/recipe/value_rule.h"
#include "config/run_spec.h"

namespace moebius {

enum class Resume { fixed, free };  // fixed: the key changes what is trained, so a resumed run must not change it

struct RecipeKey {
  std::string name;  // "section.key"
  ValueRule rule;
  // REQUIRES: rule.accepts(value). A model key goes into spec.model.source,
  // which run_spec.cc then reads as a config.json.
  std::function<void(RunSpec&, const nlohmann::json&)> read;
  // The value that read would be given; null if the key has none.
  std::function<nlohmann::json(const RunSpec&)> write;
  Resume resume = Resume::fixed;
  bool required = false;  // the value of a recipe without the key is not accepted
};

// In the order of printing, with the keys of a section together.
const std::vector<RecipeKey>& recipe_table();

// A key that recipes of earlier versions hold, and that has no effect.
struct RetiredKey {
  std::string name;         // "section.key"
  nlohmann::json accepted;  // the one value that a recipe may still give it
  std::string why;          // a clause, the reason that there is no other value
};
const std::vector<RetiredKey>& retired_keys();

// Returns the section of "section.key", or all of a name without a dot.
std::string section_of(const std::string& name);

}  // namespace moebius
