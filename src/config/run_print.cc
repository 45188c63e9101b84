#include "config/run_print.h"

#include <fmt/format.h>

#include "config/hf/keys.h"
#include "config/recipe/table.h"
#include "config/recipe/text.h"

namespace moebius {

using nlohmann::json;

namespace {

std::string origin(const RunSpec& spec, const std::string& key) {
  const auto found = spec.provenance.find(key);
  if (found == spec.provenance.end()) return "set by the program";
  return found->second == "default" ? "default" : "from " + found->second;
}

std::string bare_name(const RecipeKey& key) { return key.name.substr(key.name.find('.') + 1); }

// A model that came from a config.json is printed as model.config; its keys are shown as comments.
bool is_said_by_config(const RunSpec& spec, const RecipeKey& key) {
  return spec.model.source && section_of(key.name) == "model" && find_hf_key(bare_name(key));
}

// Returns one line without its line break; empty if there is nothing to print.
std::string line_of(const RunSpec& spec, const RecipeKey& key, bool with_provenance) {
  constexpr int kColumn = 44;  // where the origins line up
  const json value = key.write(spec);
  const bool comment = is_said_by_config(spec, key);
  if (value.is_null() || (comment && !with_provenance)) return "";
  const std::string line = fmt::format("{}{} = {}", comment ? "# " : "", bare_name(key), toml_text(value));
  return with_provenance ? fmt::format("{:<{}}  # {}", line, kColumn, origin(spec, key.name)) : line;
}

bool is_default(const RunSpec& spec, const RecipeKey& key) {
  const auto found = spec.provenance.find(key.name);
  return (found != spec.provenance.end() && found->second == "default") || is_said_by_config(spec, key);
}

struct TextChoice {
  bool with_provenance, with_defaults;
};
std::string text_of(const RunSpec& spec, TextChoice choice) {
  std::string text, section;
  for (const RecipeKey& key : recipe_table()) {
    if (!choice.with_defaults && is_default(spec, key)) continue;
    const std::string line = line_of(spec, key, choice.with_provenance);
    if (line.empty()) continue;
    const std::string begins = section_of(key.name);
    if (begins != section) text += fmt::format("{}[{}]\n", text.empty() ? "" : "\n", begins);
    section = begins;
    text += line + "\n";
  }
  return text;
}

}  // namespace

std::string to_toml(const RunSpec& spec, bool with_provenance) {
  return text_of(spec, {.with_provenance = with_provenance, .with_defaults = true});
}

std::string changed_toml(const RunSpec& spec) {
  return text_of(spec, {.with_provenance = true, .with_defaults = false});
}

}  // namespace moebius
