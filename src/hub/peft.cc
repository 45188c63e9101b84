#include "hub/peft.h"

#include <algorithm>
#include <cctype>
#include <cmath>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "core/error.h"
#include "io/files.h"
#include "io/json_text.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr std::string_view kPrefix = "base_model.model.", kSuffixA = ".lora_A.weight", kSuffixB = ".lora_B.weight";

// "model.layers.3.q_proj" as the pattern "model\.layers\.\d+\.q_proj".
std::string pattern_of(const std::string& module) {
  std::string pattern;
  for (size_t i = 0; i < module.size();) {
    const bool begins_part = i == 0 || module[i - 1] == '.';
    size_t end = i;
    while (end < module.size() && std::isdigit(static_cast<unsigned char>(module[end]))) ++end;
    if (begins_part && end > i && (end == module.size() || module[end] == '.')) {
      pattern += "\\d+";
      i = end;
      continue;
    }
    if (module[i] == '.') pattern += '\\';
    pattern += module[i++];
  }
  return pattern;
}

// Returns a pattern that also matches the name without an expert's number, and Mixtral's experts under "mlp". In
// transformers 5 all experts of a layer are one module, and PEFT 0.21 asks which of its projections the pattern
// names: "model.layers.0.mlp.experts.w1". If it names none, PEFT drops their adapters without an error.
std::string with_fused_names(std::string pattern) {
  const auto replace = [&](std::string_view from, std::string_view to) {
    if (const size_t at = pattern.find(from); at != pattern.npos) pattern.replace(at, from.size(), to);
  };
  replace("\\.experts\\.\\d+\\.", "\\.experts\\.(\\d+\\.)?");
  replace("\\.block_sparse_moe\\.", "\\.(block_sparse_moe|mlp)\\.");
  return pattern;
}

// Settings of PEFT that must have one of these values or be absent, since others change the result.
const std::map<std::string, std::vector<json>>& plain_settings() {
  static const std::map<std::string, std::vector<json>> all = {
      {"use_dora", {false}},
      {"use_qalora", {false}},
      {"lora_bias", {false}},
      {"fan_in_fan_out", {false}},
      {"bias", {"none"}},
      {"modules_to_save", {nullptr, json::array()}},
      {"trainable_token_indices", {nullptr}},
      {"layer_replication", {nullptr}},
      {"megatron_config", {nullptr}},
      {"alora_invocation_tokens", {nullptr}},
      {"arrow_config", {nullptr}},
      {"use_bdlora", {nullptr, false}},
      {"kasa_config", {nullptr}},
      {"monteclora_config", {nullptr}},
      // Others, such as "pissa" and "olora", also change the weights of the model.
      {"init_lora_weights", {true, false, nullptr, "gaussian", "orthogonal", "eva"}},
  };
  return all;
}

// Checks a table of patterns: each must be of gate_up_proj, and give twice the value of all other matrices.
void check_pattern(const json& config, const char* key, const char* of_all, const std::string& who) {
  const json patterns = config.value(key, json());
  if (patterns.is_null()) return;
  const json value = config.value(of_all, json());
  const auto is_stacked = [&](const auto& each) {
    return each.key().ends_with("gate_up_proj") && each.value().is_number() && value.is_number() &&
           each.value().template get<double>() == 2 * value.get<double>();
  };
  bool accepted = patterns.is_object();
  for (const auto& each : patterns.items()) accepted = accepted && is_stacked(each);
  MOEBIUS_CHECK(input, accepted,
                "{}: {} must be {{}}, or twice {} for gate_up_proj of experts; got {}, which this version does not "
                "compute; merge this adapter with PEFT",
                who, key, of_all, patterns.dump());
}

void check_patterns(const json& config, const std::string& who) {
  check_pattern(config, "rank_pattern", "r", who);
  check_pattern(config, "alpha_pattern", "lora_alpha", who);
  const auto keys = [&](const char* key) {
    std::set<std::string> all;
    const auto patterns = config.find(key);
    if (patterns == config.end()) return all;
    for (const auto& each : patterns->items()) all.insert(each.key());
    return all;
  };
  // Then their products have the scale of the others.
  const std::set<std::string> ranks = keys("rank_pattern");
  MOEBIUS_CHECK(input,
                ranks == keys("alpha_pattern") && (ranks.empty() || !config.value("use_rslora", json()).is_boolean() ||
                                                   config["use_rslora"] == false),
                "{}: rank_pattern must have the keys of alpha_pattern, and no use_rslora with it; got {} and {}; merge "
                "this adapter with PEFT",
                who, config.value("rank_pattern", json()).dump(), config.value("alpha_pattern", json()).dump());
}

std::string checked_folder(const std::string& dir) {
  const bool is_pickle =
      !std::filesystem::exists(dir + "/" + kPeftWeights) && std::filesystem::exists(dir + "/adapter_model.bin");
  MOEBIUS_CHECK(
      input, !is_pickle,
      "adapter {}: expected {}; got adapter_model.bin, a pickle, which can run code when it is loaded; load it "
      "with PEFT, and save it with save_pretrained(..., safe_serialization=True)",
      dir, kPeftWeights);
  for (const char* file : {kPeftConfig, kPeftWeights}) {
    MOEBIUS_CHECK(input, std::filesystem::is_regular_file(dir + "/" + file),
                  "adapter {}: expected a folder of PEFT with {}; there is none; check the path", dir, file);
  }
  return dir;
}

}  // namespace

LoraSpec parse_peft_config(std::string_view text, const std::string& who) {
  constexpr double kMaxRank = 1 << 16;  // the maximum of lora.rank
  const json config = parse_json(text, who);
  MOEBIUS_CHECK(
      input, config.is_object() && config.value("peft_type", json()) == "LORA",
      "{}: expected an adapter of peft_type \"LORA\"; got {}; choose another adapter, or merge this one with PEFT", who,
      config.is_object() ? config.value("peft_type", json("none")).dump() : config.type_name());
  for (const auto& [key, values] : plain_settings()) {
    if (!config.contains(key)) continue;
    MOEBIUS_CHECK(input, std::find(values.begin(), values.end(), config[key]) != values.end(),
                  "{}: {} must be {}; got {}, which this version does not compute; merge this adapter with PEFT", who,
                  key, values.front().dump(), config[key].dump());
  }
  check_patterns(config, who);
  const auto number = [&](const char* key, double least, double most) {
    const json value = config.value(key, json());
    MOEBIUS_CHECK(input, value.is_number() && value.get<double>() >= least && value.get<double>() <= most,
                  "{}: {} must be a number from {} to {}; got {}", who, key, least, most, value.dump());
    return value.get<double>();
  };
  const double rank = number("r", 1, kMaxRank);
  const json is_scaled = config.value("use_rslora", json(false));
  MOEBIUS_CHECK(input, is_scaled.is_boolean(), "{}: use_rslora must be true or false; got {}", who, is_scaled.dump());
  // Its products are multiplied by lora_alpha / sqrt(r), and those of others by lora_alpha / r.
  const double more = is_scaled.get<bool>() ? std::sqrt(rank) : 1;
  const LoraSpec lora{.rank = static_cast<int64_t>(rank), .alpha = number("lora_alpha", 1e-30, 1e30) * more};
  MOEBIUS_CHECK(input, static_cast<double>(lora.rank) == rank, "{}: r must be a whole number; got {}", who,
                config["r"].dump());
  return lora;
}

bool has_peft_module(HfFamily family, const std::string& model_type, const std::string& canonical) {
  const bool is_router = canonical.ends_with(".mlp.gate");
  if (family == HfFamily::gpt_oss) return !is_router && !parse_expert_name(canonical + ".weight");
  return !is_router || (model_type != "deepseek_v2" && model_type != "deepseek_v3");
}

std::string hf_module(HfFamily family, const std::string& canonical) {
  const std::string name = hf_name(family, canonical + ".weight");
  return name.substr(0, name.size() - std::string_view(".weight").size());
}

std::string canonical_module(HfFamily family, const std::string& module) {
  const std::string name = canonical_name(family, module + ".weight");
  return name.substr(0, name.size() - std::string_view(".weight").size());
}

namespace {

// Returns one pattern if it matches the modules and no others, else their names.
json target_modules(const PeftTargets& all) {
  const std::set<std::string> targets(all.modules.begin(), all.modules.end());
  std::set<std::string> patterns;
  for (const std::string& module : all.modules) patterns.insert(pattern_of(module));
  const bool is_exact = std::all_of(all.all_modules.begin(), all.all_modules.end(), [&](const std::string& module) {
    return targets.contains(module) || !patterns.contains(pattern_of(module));
  });
  if (!is_exact || patterns.empty()) return all.modules;
  std::string pattern;
  for (const std::string& each : patterns) pattern += (pattern.empty() ? "" : "|") + with_fused_names(each);
  return pattern;
}

// "model.layers.3.mlp.experts.down_proj" as "mlp.experts.down_proj".
std::string end_of_parameter(const std::string& name) {
  size_t at = name.find("layers.");
  if (at != name.npos) at = name.find('.', at + std::string_view("layers.").size());
  return at == name.npos ? name : name.substr(at + 1);
}

// Returns an end of the names where it stands for the parameters and no others, else the names.
json target_parameters(const PeftTargets& all) {
  const std::set<std::string> targets(all.parameters.begin(), all.parameters.end());
  std::set<std::string> names;
  for (const std::string& parameter : all.parameters) {
    const std::string end = end_of_parameter(parameter);
    const bool is_exact = std::all_of(
        all.all_parameters.begin(), all.all_parameters.end(),
        [&](const std::string& other) { return targets.contains(other) || end_of_parameter(other) != end; });
    names.insert(is_exact ? end : parameter);
  }
  return std::vector<std::string>(names.begin(), names.end());
}

// With transformers 5, PEFT 0.21 turns adapters of an MoE model into those of parameters, except for attention.
bool become_parameters(const PeftTargets& all) {
  const auto has = [](std::string_view part) {
    return [part](const std::string& module) { return module.find(part) != module.npos; };
  };
  return std::any_of(all.all_modules.begin(), all.all_modules.end(), has(".experts.")) &&
         !std::all_of(all.modules.begin(), all.modules.end(), has(".self_attn."));
}

}  // namespace

json peft_config(const LoraSpec& lora, const std::string& base_model, const PeftTargets& targets) {
  const auto number = [](double value) {
    const auto whole = static_cast<int64_t>(value);
    return static_cast<double>(whole) == value ? json(whole) : json(value);
  };
  json config = {{"peft_type", "LORA"},
                 {"task_type", "CAUSAL_LM"},
                 {"base_model_name_or_path", base_model},
                 {"inference_mode", true},
                 {"r", lora.rank},
                 {"lora_alpha", number(lora.alpha)},
                 // PEFT has no dropout for parameters, and refuses to load an adapter that asks for it.
                 {"lora_dropout", targets.parameters.empty() && !become_parameters(targets) ? lora.dropout : 0},
                 {"bias", "none"},
                 {"fan_in_fan_out", false},
                 {"init_lora_weights", true},
                 {"modules_to_save", nullptr},
                 {"target_modules", target_modules(targets)}};
  if (targets.parameters.empty()) return config;
  config["target_parameters"] = target_parameters(targets);
  config["peft_version"] = "0.19.0";
  for (const std::string& parameter : targets.stacked) {
    config["rank_pattern"][parameter] = 2 * lora.rank;
    config["alpha_pattern"][parameter] = number(2 * lora.alpha);
  }
  return config;
}

PeftFolder::PeftFolder(const std::string& dir, const ExpertAdapters& model)
    : dir_(dir), file_(SafetensorsFile::open(checked_folder(dir) + "/" + kPeftWeights)) {
  const std::string who = dir + "/" + kPeftConfig, text = read_file(who);
  lora_ = parse_peft_config(text, who);
  const json base_name = parse_json(text, who).value("base_model_name_or_path", json());
  if (base_name.is_string()) base_name_ = base_name;
  std::vector<SafetensorsEntry> of_experts;
  for (const SafetensorsEntry& stored : file_.entries()) {
    const bool is_a = stored.name.ends_with(kSuffixA), is_b = stored.name.ends_with(kSuffixB);
    MOEBIUS_CHECK(input, stored.name.starts_with(kPrefix) && (is_a || is_b),
                  "adapter {}: expected tensors {}...{} and {}; got {}; adapters of the embedding and the head are not "
                  "supported, so merge such an adapter with PEFT",
                  dir, kPrefix, kSuffixA, kSuffixB, stored.name);
    const std::string_view suffix = is_a ? kSuffixA : kSuffixB;
    const std::string module = stored.name.substr(kPrefix.size(), stored.name.size() - kPrefix.size() - suffix.size());
    if (layer_of_expert_adapter(module))
      of_experts.push_back(stored);
    else
      entries_.push_back(
          {canonical_module(model.family, module) + std::string(suffix), stored.shape, stored, {}, lora_.rank});
  }
  if (!of_experts.empty()) {
    add_experts(model, of_experts, parse_json(text, who));
  }
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(entries_.begin(), entries_.end(),
                                        [](const Entry& a, const Entry& b) { return a.name == b.name; });
  MOEBIUS_CHECK(input, twice == entries_.end(), "adapter {}: expected a tensor once; got {} and {}, which are the same",
                dir, twice->stored.name, std::next(twice)->stored.name);
}

std::string PeftFolder::base_fingerprint() const {
  const auto found = file_.metadata().find(kPeftBaseKey);
  return found == file_.metadata().end() ? "" : found->second;
}

void PeftFolder::add_experts(ExpertAdapters x, const std::vector<SafetensorsEntry>& stored, const json& config) {
  const json version = config.value("peft_version", json()), ranks = config.value("rank_pattern", json());
  x.rank = lora_.rank;
  const auto partner = [&](const SafetensorsEntry& a) {
    const std::string name = a.name.substr(0, a.name.size() - kSuffixA.size()) + std::string(kSuffixB);
    return std::find_if(stored.begin(), stored.end(), [&](const SafetensorsEntry& b) { return b.name == name; });
  };
  std::vector<ExpertAdapterPair> pairs;
  for (const SafetensorsEntry& a : stored) {
    if (!a.name.ends_with(kSuffixA)) continue;
    const auto b = partner(a);
    MOEBIUS_CHECK(input, b != stored.end(),
                  "adapter {}: expected a B for {}; got none; check that the file is complete", dir_, a.name);
    const std::string_view module = std::string_view(a.name).substr(kPrefix.size());
    pairs.push_back({*layer_of_expert_adapter(module.substr(0, module.size() - kSuffixA.size())), a, *b});
  }
  MOEBIUS_CHECK(
      input, 2 * pairs.size() == stored.size(),
      "adapter {}: expected an A for each B of experts; got {}, and {} of A and B; check that the file is complete",
      dir_, counted(std::ssize(stored), "tensor"), counted(std::ssize(pairs), "pair"));
  x.is_exchanged = is_exchanged(x, pairs, version.is_string() ? version.get<std::string>() : "", "adapter " + dir_);
  for (const ExpertAdapterPair& pair : pairs) {
    const bool is_wide = is_stacked(x, pair);
    x.are_stacked = is_wide && has_two_blocks(x, whole(pair.b), pair.b.dtype);
    x.share_wide_a = is_wide && !x.are_stacked;
    MOEBIUS_CHECK(input, !x.share_wide_a || (ranks.is_object() && !ranks.empty()),
                  "adapter {}: expected rank {} for {}, since {} has no rank_pattern; got twice that; check that the "
                  "two files belong together",
                  dir_, lora_.rank, pair.b.name, kPeftConfig);
    for (const std::string& name : parts_of_pair(x, pair)) {
      const std::optional<FusedPlace> place = expert_adapter_place(x, name);
      MOEBIUS_ASSERT(place);
      const bool in_a = place->name.ends_with(kSuffixA);
      const int64_t rank = name.ends_with(kSuffixA) ? place->rows : place->cols;
      entries_.push_back({name, {place->rows, place->cols}, in_a ? pair.a : pair.b, place, rank});
    }
  }
  has_fused_experts_ = true;
}

// An expert's tensor is a strided part of a large one, so that one is kept. A layer has four.
const std::vector<std::byte>& PeftFolder::whole(const SafetensorsEntry& stored) const {
  constexpr size_t kKept = 4;
  for (const auto& [name, bytes] : read_)
    if (name == stored.name) return bytes;
  if (read_.size() == kKept) read_.pop_front();
  std::vector<std::byte> bytes(static_cast<size_t>(stored.bytes));
  file_.read(stored, bytes.data());
  return read_.emplace_back(stored.name, std::move(bytes)).second;
}

void PeftFolder::read(const Entry& entry, void* dst) const {
  if (!entry.place) return file_.read(entry.stored, dst);
  take_from_fused(dst, whole(entry.stored).data(), *entry.place, size_of(entry.stored.dtype));
}

}  // namespace moebius
