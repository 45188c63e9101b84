#include "config/run_spec.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <vector>

#include "config/hf/config.h"
#include "config/hf/keys.h"
#include "config/hf/rope.h"
#include "config/longer_context.h"
#include "config/nearest.h"
#include "config/other_names.h"
#include "config/recipe/table.h"
#include "config/recipe/text.h"
#include "core/error.h"

namespace moebius {

using nlohmann::json;

namespace {

std::string read_text(const std::string& path, const std::string& what) {
  std::error_code unreadable;
  MOEBIUS_CHECK(io, !std::filesystem::is_directory(path, unreadable), "{}: expected {}; got a folder; give the file",
                path, what);
  constexpr size_t kMaxBytes = 16 << 20;  // a device such as /dev/zero has no end
  std::ifstream file(path, std::ios::binary);
  std::string text;
  std::vector<char> block(1 << 16);
  while (file && text.size() <= kMaxBytes) {
    file.read(block.data(), std::ssize(block));
    text.append(block.data(), static_cast<size_t>(file.gcount()));
  }
  MOEBIUS_CHECK(io, text.size() <= kMaxBytes, "{}: expected {}, at most {} bytes; got more; check the path", path, what,
                kMaxBytes);
  MOEBIUS_CHECK(io, file.eof() && !file.bad(), "{}: cannot read {}; check that the file exists and may be read", path,
                what);
  return text;
}

// In quotes if spaces or quotes would hide where the key begins or ends.
std::string shown_key(const std::string& key) {
  const bool plain = !key.empty() && key.find_first_of(" \t\"'") == std::string::npos;
  return plain ? key : shown(json(key));
}

bool is_section(const std::string& name) {
  const auto& table = recipe_table();
  return std::any_of(table.begin(), table.end(), [&](const RecipeKey& k) { return section_of(k.name) == name; });
}

[[noreturn]] void fail_unknown(const RecipeEntry& entry) {
  MOEBIUS_CHECK(usage, entry.key != "parallel.dp",
                "{}: parallel.dp is not a key; it is what tp, cp and pp leave of the number of ranks", entry.where);
  MOEBIUS_CHECK(usage, !is_section(entry.key), "{}: {} is a section; write its keys under [{}]; got the value {}",
                entry.where, entry.key, entry.key, shown(entry.value));
  std::string hint = other_name_hint(entry.key);
  const std::string near = nearest_if_near(entry.key, recipe_keys());
  if (hint.empty() && !near.empty()) hint = fmt::format("; did you mean {}?", near);
  MOEBIUS_FAIL(usage, "{}: unknown key {}{}{}", entry.where, shown_key(entry.key), hint,
               hint.empty() ? "; moebius config --keys lists them all" : "");
}

const RecipeKey& find_key(const RecipeEntry& entry) {
  const auto& table = recipe_table();
  const auto found = std::find_if(table.begin(), table.end(), [&](const RecipeKey& k) { return k.name == entry.key; });
  if (found == table.end()) fail_unknown(entry);
  return *found;
}

bool is_empty_section(const RecipeEntry& entry) { return entry.value == json::object() && is_section(entry.key); }

// Returns whether the entry has a retired key, which is then passed over. Throws Error{usage} unless it
// has its accepted value.
bool is_retired(const RecipeEntry& entry) {
  const auto& keys = retired_keys();
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const RetiredKey& k) { return k.name == entry.key; });
  if (found == keys.end()) return false;
  MOEBIUS_CHECK(usage, entry.value == found->accepted, "{}: {} is no longer a key, since {}; got {}; remove it",
                entry.where, entry.key, found->why, shown(entry.value));
  return true;
}

void apply(RunSpec& spec, const RecipeEntry& entry) {
  if (is_empty_section(entry) || is_retired(entry)) return;
  const RecipeKey& key = find_key(entry);
  MOEBIUS_CHECK(usage, key.rule.accepts(entry.value), "{}: {} must be {}; got {}{}", entry.where, entry.key,
                key.rule.expects, shown(entry.value), key.rule.hint ? key.rule.hint(entry.value) : "");
  key.read(spec, entry.value);
  spec.provenance[entry.key] = entry.where;
}

// Returns the config.json key of "model.KEY"; empty for keys of other sections, model.hf,
// model.config and model.init_from.
std::string inline_model_key(const std::string& name) {
  if (section_of(name) != "model") return "";
  const std::string key = name.substr(name.find('.') + 1);
  return find_hf_key(key) ? key : "";
}

// origin: "model.hf", with which a recipe may extend the context, or "model.config".
void refuse_inline_keys(const RunSpec& spec, const std::string& origin) {
  for (const auto& [name, where] : spec.provenance) {
    const std::string key = inline_model_key(name);
    MOEBIUS_CHECK(usage, key.empty() || (origin == "model.hf" && extends_context(key)),
                  "{}: {} and {} ({}) both give the model; keep one, or edit a copy of the config.json", where, name,
                  origin, spec.provenance.at(origin));
  }
}

// Throws Error{usage} for keys that the family does not have: they would have no effect.
void refuse_foreign_keys(const RunSpec& spec) {
  const json type = spec.model.source->value("model_type", json("moebius"));
  for (const auto& [name, where] : spec.provenance) {
    const std::string key = inline_model_key(name);
    MOEBIUS_CHECK(
        usage, key.empty() || has_hf_key(type.get<std::string>(), key),
        "{}: {} is not a key of model_type {}; \"moebius\" has every key, but cannot be exported to Hugging Face",
        where, name, shown(type));
  }
}

// Throws Error{usage} for entries of a recipe's table of RoPE that are not read. Those of a folder's config.json may be
// for other software.
void refuse_unknown_rope_keys(const RunSpec& spec) {
  if (!spec.model.source) return;
  const std::vector<std::string> known = rope_table_keys();
  const auto where = [&](const std::string& key) { return spec.provenance.at("model." + key); };
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json table = spec.model.source->value(key, json());
    if (!table.is_object()) continue;
    for (const auto& [name, entry] : table.items()) {
      if (entry.is_object() || std::ranges::find(known, name) != known.end()) continue;
      const std::string near = nearest_if_near(name, known);
      MOEBIUS_FAIL(usage, "{}: model.{} has no entry {}{}; its entries are {}", where(key), key, name,
                   near.empty() ? "" : fmt::format("; did you mean {}?", near), fmt::join(known, ", "));
    }
  }
}

json read_config_json(const std::string& dir) {
  const std::string path = dir + "/config.json";
  std::error_code unreadable;
  MOEBIUS_CHECK(
      io, std::filesystem::exists(dir, unreadable) || unreadable,
      "{}: cannot read the model's config.json; there is no folder {}, and nothing is downloaded; give the path "
      "of a model's folder",
      path, dir);
  const json config = json::parse(read_text(path, "the model's config.json"), nullptr, false);
  MOEBIUS_CHECK(input, config.is_object(), "{}: expected a JSON object; the file is not one; fetch it again", path);
  return config;
}

// YaRN takes a factor that its table lacks from the two lengths. run_notes() says so.
void note_factor_by_lengths(RunSpec& spec, const json& config) {
  if (spec.model.rope_scaling.type != RopeType::yarn) return;
  bool has_table = false, has_factor = false;
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json table = config.value(key, json());
    if (!table.is_object() || table.empty()) continue;
    has_table = true;
    has_factor = has_factor || !table.value("factor", json()).is_null();
  }
  if (has_table && !has_factor) spec.provenance[kYarnFactor] = "max_position_embeddings";
}

void resolve_config_model(RunSpec& spec) {
  const bool held = spec.provenance.contains("model.config");
  refuse_inline_keys(spec, held ? "model.config" : "model.hf");
  if (!held) refuse_unknown_rope_keys(spec);
  const json changes = spec.model.source ? *spec.model.source : json::object(),
             config = held ? changes : with_longer_context(read_config_json(spec.model_hf), changes);
  spec.model = held ? read_hf_config(config, spec.provenance["model.config"] + ": model.config", ErrorKind::usage)
                    : model_spec_from_hf(config, spec.model_hf + "/config.json");
  note_factor_by_lengths(spec, config);
}

void resolve_inline_model(RunSpec& spec, const std::string& name) {
  MOEBIUS_CHECK(usage, spec.model.source,
                "{}: the recipe has no model; give [model] hf = \"DIR\", or the keys of its config.json", name);
  refuse_foreign_keys(spec);
  refuse_unknown_rope_keys(spec);
  json config = *spec.model.source;
  config.emplace("model_type", "moebius");
  spec.model = read_hf_config(config, name + " [model]", ErrorKind::usage);
  note_factor_by_lengths(spec, config);
}

// The data of a model from a folder has the tokenizer of that folder, unless the
// recipe names another.
void take_tokenizer_of_model(RunSpec& spec) {
  std::error_code unreadable;
  if (spec.model_hf.empty() || spec.provenance.contains("data.tokenizer")) return;
  if (!std::filesystem::exists(spec.model_hf + "/tokenizer.json", unreadable)) return;
  spec.data.tokenizer = spec.model_hf;
  spec.provenance["data.tokenizer"] = "model.hf";
}

void balance_by_bias(RunSpec& spec) {
  if (!spec.moe.bias || spec.model.expert_bias || !has_hf_key(spec.model.family, "expert_bias")) return;
  MOEBIUS_CHECK(usage, !spec.provenance.contains("model.expert_bias"),
                "{}: model.expert_bias = false and moe.balance \"bias\" ({}) contradict each other; remove one",
                spec.provenance["model.expert_bias"], spec.provenance["moe.balance"]);
  spec.model.expert_bias = true;
  spec.provenance["model.expert_bias"] = "moe.balance";
}

// Layers that keep pre-activations in 8 bits recompute the outputs of their norms too, unless a key says otherwise:
// these are the largest tensors that would stay, and recomputing them is one pass over memory.
void recompute_norms(RunSpec& spec) {
  if (spec.precision.activations != PrecisionChoice::recipe || spec.provenance.contains("memory.recompute")) return;
  spec.memory.recompute.norm = !spec.memory.offload.covers(&RecomputeSpec::norm);
}

// Returns the origin of a model key's value: its own entry, or that of another spelling of the property.
std::string model_origin(const RunSpec& spec, const json& config, const HfKey& key) {
  const auto property = [](const HfKey& k) { return k.written_as.empty() ? k.name : k.written_as; };
  std::string origin = "default";
  for (const HfKey& other : hf_keys()) {
    if (property(other) != property(key)) continue;
    const auto entry = spec.provenance.find("model." + other.name);
    if (entry != spec.provenance.end()) origin = entry->second;
    if (config.contains(other.name)) origin = "config.json";
    if (other.name == key.name && origin != "default") return origin;
  }
  return origin;
}

void fill_provenance(RunSpec& spec) {
  std::map<std::string, std::string> filled = spec.provenance;
  const json config = spec.model.source ? *spec.model.source : json::object();
  for (const RecipeKey& key : recipe_table()) {
    if (key.write(spec).is_null()) continue;
    const std::string hf_name = inline_model_key(key.name);
    filled.emplace(key.name, hf_name.empty() ? "default" : model_origin(spec, config, *find_hf_key(hf_name)));
  }
  spec.provenance = std::move(filled);
}

void resolve_model(RunSpec& spec, const std::string& name) {
  const bool from_config = !spec.model_hf.empty() || spec.provenance.contains("model.config");
  from_config ? resolve_config_model(spec) : resolve_inline_model(spec, name);
  if (!from_config) spec.model.source = {};
  balance_by_bias(spec);
  take_tokenizer_of_model(spec);
  recompute_norms(spec);
  fill_provenance(spec);
  // The source holds the whole spec from here on, so that it reads back to the same spec.
  if (from_config) spec.model.source = hf_from_model_spec(spec.model);
}

}  // namespace

RunSpec parse_run_spec(const std::string& text, const std::string& name, const std::vector<std::string>& overrides) {
  RunSpec spec;
  for (const RecipeEntry& entry : read_recipe(text, name)) apply(spec, entry);
  for (const std::string& assignment : overrides) apply(spec, read_override(assignment));
  resolve_model(spec, name);
  return spec;
}

RunSpec load_run_spec(const std::string& path, const std::vector<std::string>& overrides) {
  return parse_run_spec(read_text(path, "the recipe"), path, overrides);
}

std::vector<std::string> recipe_keys() {
  std::vector<std::string> keys;
  for (const RecipeKey& key : recipe_table()) keys.push_back(key.name);
  std::sort(keys.begin(), keys.end());
  return keys;
}

std::vector<std::string> config_diff(const RunSpec& a, const RunSpec& b) {
  const auto text = [](const json& value) { return value.is_null() ? std::string("(none)") : toml_text(value); };
  std::vector<std::string> lines;
  for (const RecipeKey& key : recipe_table()) {
    if (key.resume == Resume::free) continue;
    const std::string before = text(key.write(a)), after = text(key.write(b));
    if (before != after) lines.push_back(fmt::format("{}: {} -> {}", key.name, before, after));
  }
  return lines;
}

std::string train_identity(const RunSpec& spec) {
  std::string text;
  for (const RecipeKey& key : recipe_table()) {
    const json value = key.write(spec);
    if (key.resume == Resume::fixed && !value.is_null()) text += fmt::format("{} = {}\n", key.name, toml_text(value));
  }
  return text;
}

}  // namespace moebius
