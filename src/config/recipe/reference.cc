#include "config/recipe/reference.h"

#include <fmt/format.h>

#include <algorithm>

#include "config/recipe/table.h"
#include "config/recipe/text.h"
#include "core/error.h"

namespace moebius {

namespace {

constexpr const char* kIntroduction = R"(# Recipes

<!-- Written by `moebius config --keys`; a test compares them. -->

A recipe is one TOML file: sections of keys. `--set SECTION.KEY=VALUE` behind a command sets a key over it; the value is TOML, or a word as it stands; what the shell would take apart
goes in quotes: `--set 'data.train=["a", "b"]'`. An unknown key is an error. `moebius config RECIPE` prints every value and where it came from, and with `--changed` only
those that are given.

A dataset is the PREFIX that `moebius data build --out` was given. Several are a blend, each with the share of its weight in what is drawn; a bare PREFIX has weight 1:

```toml
[data]
train = ["data/books", {prefix = "data/code", weight = 0.5}]
valid = ["data/held"]
```

**On resume.** A run that goes on from its checkpoint keeps the keys without a "yes" in the last column; with another value of one of them it is another run, and refused. For another learning rate in the
middle of a run, start one in a new `run.dir` with `model.init_from` = the old run's folder: it takes the weights, and begins with fresh moments and at step 1.

**The model.** Its keys are those of a Hugging Face `config.json`: in the recipe itself, or in the folder that `model.hf` names, not in both: to change one key of a model that exists, copy its
config.json into a folder of its own, edit it there, name that folder in `model.hf` and the folder of the weights in `model.init_from`. Defaults are those of `moebius`; another family
has those of its config class in transformers, and only the keys that the class has. A model of type `moebius` may have every key, trains, evaluates and generates, and
cannot be exported to Hugging Face: for that name a family ([formats.md](formats.md), "Hugging Face models", says which has what).
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

}  // namespace

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
