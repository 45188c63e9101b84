#include "config/recipe/reference.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "config/recipe/table.h"
#include "config/recipe/text.h"
#include "core/error.h"

namespace moebius {

namespace {

constexpr const char* kIntroduction = R"(# Recipes

<!-- Written by `moebius config --keys`; a test compares them. -->

A recipe is one TOML file: sections of keys.
`--set SECTION.KEY=VALUE` on the command line overrides a key.
VALUE is TOML, or a plain word.
Quote a value that the shell would split: `--set 'data.train=["a", "b"]'`.
An unknown key is an error.
`moebius config RECIPE` prints every value and where it came from.
With `--changed` it prints only those that are set explicitly.

**Datasets.**
A dataset is the PREFIX that `moebius data build --out` was given.
Several datasets are blended, in proportion to their weights.
A bare PREFIX has weight 1:

```toml
[data]
train = ["data/books", {prefix = "data/code", weight = 0.5}]
valid = ["data/held"]
```

**On resume.**
A key without a "yes" in the last column must not change when a run resumes from its checkpoint;
a changed value is refused.
To change the learning rate in the middle of a run, start one in a new `run.dir`, with
`model.init_from` = the old run's folder.
The new run loads the weights, and starts at step 1 with zero moments.

**The model.**
Its keys are those of a Hugging Face `config.json`.
They are in the recipe itself, or in the folder that `model.hf` names, but not in both.
`max_position_embeddings`, `rope_theta` and `rope_scaling` are exceptions: together with
`model.hf` they extend the context of a trained model.
To change another key of an existing model, copy its config.json into another folder and edit it.
Name that folder in `model.hf`, and the folder of the weights in `model.init_from`.

Defaults are those of the model type `moebius`.
Another family has the defaults of its config class in transformers, and only its keys.
A model of type `moebius` may have every key, and it trains, evaluates and generates.
It cannot be exported to Hugging Face; that needs a model of another type.
[formats.md](formats.md#hugging-face-models) lists which family has what.
)";

// The smallest model. All other keys have their defaults.
constexpr const char* kSmallest = R"([model]
vocab_size = 1
hidden_size = 2
num_hidden_layers = 1
num_attention_heads = 1
max_position_embeddings = 1
)";

const KeyText& text_of(const std::string& name) {
  const auto& texts = key_texts();
  const auto found = std::find_if(texts.begin(), texts.end(), [&](const KeyText& t) { return t.name == name; });
  MOEBIUS_ASSERT(found != texts.end());
  return *found;
}

std::string in_a_cell(std::string text) {
  for (size_t at = 0; (at = text.find('|', at)) != std::string::npos; at += 2) text.insert(at, 1, '\\');
  return text;
}

std::string unset_text(const RecipeKey& key, const KeyText& text, const RunSpec& smallest) {
  if (!text.unset.empty()) return std::string(text.unset);
  const nlohmann::json value = key.write(smallest);
  return value.is_null() || value == "" ? "none" : fmt::format("`{}`", toml_text(value));
}

std::string row_of(const RecipeKey& key, const RunSpec& smallest) {
  const KeyText& text = text_of(key.name);
  return fmt::format("| {} | {} | {} | {} | {} |\n", key.name.substr(key.name.find('.') + 1),
                     in_a_cell(std::string(text.what)), in_a_cell(key.rule.expects), unset_text(key, text, smallest),
                     key.resume == Resume::free ? "yes" : "");
}

// A key without a value takes the first of these that it accepts.
std::string type_of(const RecipeKey& key, const nlohmann::json& value) {
  using nlohmann::json;
  if (value.is_boolean()) return "boolean";
  for (const json& probe :
       {value, json(true), json(1), json("text"), json::array({"text"}), json::array({1}), json::object()}) {
    if (probe.is_null() || !key.rule.accepts(probe)) continue;
    if (probe.is_number()) return key.rule.accepts(0.5) || key.rule.accepts(1.5) ? "number" : "integer";
    return probe.type_name();
  }
  return value.is_null() ? "string" : value.type_name();  // a string of a form that no probe has
}

}  // namespace

nlohmann::ordered_json recipe_reference_json() {
  const RunSpec smallest = parse_run_spec(kSmallest, "the smallest recipe", {});
  nlohmann::ordered_json keys = nlohmann::ordered_json::array();
  for (const RecipeKey& key : recipe_table()) {
    const KeyText& text = text_of(key.name);
    const nlohmann::json value = key.write(smallest);
    nlohmann::ordered_json row{{"key", key.name},
                               {"type", type_of(key, value)},
                               {"default", nlohmann::ordered_json(text.unset.empty() ? value : nlohmann::json())},
                               {"values", key.rule.expects},
                               {"text", text.what},
                               {"required", key.required},
                               {"may_change_on_resume", key.resume == Resume::free}};
    if (!text.unset.empty()) row["default_text"] = text.unset;
    keys.push_back(row);
  }
  return {{"keys", keys}};
}

std::string recipe_reference() {
  const RunSpec smallest = parse_run_spec(kSmallest, "the smallest recipe", {});
  std::string out = kIntroduction, section;
  for (const RecipeKey& key : recipe_table()) {
    if (section_of(key.name) != section) {
      section = section_of(key.name);
      out += fmt::format(
          "\n## [{}]\n\n| key | what it does | values | default | may change on resume |\n"
          "| --- | --- | --- | --- | --- |\n",
          section);
    }
    out += row_of(key, smallest);
  }
  return out;
}

}  // namespace moebius
