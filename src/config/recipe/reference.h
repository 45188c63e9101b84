// The text of docs/reference/recipe.md: what each key of a recipe does. `moebius config
// --keys` prints it.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace moebius {

struct KeyText {
  std::string_view name;  // "section.key"
  std::string_view what;  // a sentence
  // The value of a recipe without the key, in Markdown. Empty: it is looked up.
  std::string_view unset = {};
};

// One for each key of recipe_table(), in any order; a test compares both lists.
const std::vector<KeyText>& key_texts();

// Returns one JSON object: `keys` is a list of objects in the order of recipe_table(). Each has key, type,
// default, values, text, required and may_change_on_resume. type is a name of JSON's: boolean,
// integer, number, string, array or object. default is the value of a recipe without the key, null
// if there is none. Where it depends on other keys, default_text says how. REQUIRES: key_texts()
// has every key.
nlohmann::ordered_json recipe_reference_json();

// Markdown: how a recipe is written, then a table for each section, in the order of recipe_table().
// REQUIRES: key_texts() has every key.
std::string recipe_reference();

}  // namespace moebius
