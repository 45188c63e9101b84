// The text of recipes: TOML and --set overrides in, flat entries out; values out as TOML.
// It does not know which keys exist.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace moebius {

struct RecipeEntry {
  std::string key;       // "section.key"; "section" for an empty section and for a key outside of sections
  nlohmann::json value;  // tables and arrays included; never a date
  std::string where;     // "NAME:LINE" or "--set"
};

// Returns the keys of the sections of a TOML text. Throws Error{usage} "NAME:LINE:COLUMN: ..." when it is not TOML
// or holds a date.
std::vector<RecipeEntry> read_recipe(const std::string& text, const std::string& name);

// Returns key and value of "section.key=value", both without spaces around them. Throws Error{usage} when there is no
// "=" or no key.
std::pair<std::string, std::string> split_assignment(const std::string& assignment);

// Parses "section.key=value"; spaces around either are ignored. The value is TOML, or else a string (a bare word, a
// path, a date). Throws Error{usage} when there is no "=", no key, or an opened bracket or quote is not closed.
RecipeEntry read_override(const std::string& assignment);

// Returns the value as TOML on one line; floats have the fewest digits that read back the same. REQUIRES:
// no null inside.
std::string toml_text(const nlohmann::json& value);

}  // namespace moebius
