// The text of docs/reference/recipe.md: what each key of a recipe does. `moebius config --keys` prints it.
#pragma once

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

// Markdown: how a recipe is written, then a table for each section, in the order of recipe_table().
// REQUIRES: key_texts() has every key.
std::string recipe_reference();

}  // namespace moebius
