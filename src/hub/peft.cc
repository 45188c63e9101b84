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

// Settings of PEFT that must have one of these values or be absent, since others change the result.
const std::map<std::string, std::vector<json>>& plain_settings() {
  static const std::map<std::string, std::vector<json>> all = {
      {"use_dora", {false}},
      {"use_qalora", {false}},
      {"lora_bias", {false}},
      {"fan_in_fan_out", {false}},
      {"bias", {"none"}},
      {"modules_to_save", {nullptr, json::array()}},
      {"target_parameters", {nullptr, json::array()}},
      {"trainable_token_indices", {nullptr}},
      {"layer_replication", {nullptr}},
      {"rank_pattern", {nullptr, json::object()}},
      {"alpha_pattern", {nullptr, json::object()}},
      {"megatron_config", {nullptr}},
      {"alora_invocation_tokens", {nullptr}},
      {"arrow_config", {nullptr}},
  };
  return all;
}

std::string checked_folder(const std::string& dir) {
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

json peft_config(const LoraSpec& lora, const std::string& base_model, const std::vector<std::string>& modules,
                 const std::vector<std::string>& all_modules) {
  const std::set<std::string> targets(modules.begin(), modules.end());
  std::set<std::string> patterns;
  for (const std::string& module : modules) patterns.insert(pattern_of(module));
  const bool is_exact = std::all_of(all_modules.begin(), all_modules.end(), [&](const std::string& module) {
    return targets.contains(module) || !patterns.contains(pattern_of(module));
  });
  std::string pattern;
  for (const std::string& each : patterns) pattern += (pattern.empty() ? "" : "|") + each;
  const auto whole = static_cast<int64_t>(lora.alpha);
  return {{"peft_type", "LORA"},
          {"task_type", "CAUSAL_LM"},
          {"base_model_name_or_path", base_model},
          {"inference_mode", true},
          {"r", lora.rank},
          {"lora_alpha", static_cast<double>(whole) == lora.alpha ? json(whole) : json(lora.alpha)},
          {"lora_dropout", lora.dropout},
          {"bias", "none"},
          {"fan_in_fan_out", false},
          {"init_lora_weights", true},
          {"modules_to_save", nullptr},
          {"target_modules", is_exact ? json(pattern) : json(modules)}};
}

PeftFolder::PeftFolder(const std::string& dir, HfFamily family)
    : file_(SafetensorsFile::open(checked_folder(dir) + "/" + kPeftWeights)),
      lora_(parse_peft_config(read_file(dir + "/" + kPeftConfig), dir + "/" + kPeftConfig)) {
  for (const SafetensorsEntry& stored : file_.entries()) {
    const bool is_a = stored.name.ends_with(kSuffixA), is_b = stored.name.ends_with(kSuffixB);
    MOEBIUS_CHECK(input, stored.name.starts_with(kPrefix) && (is_a || is_b),
                  "adapter {}: expected tensors {}...{} and {}; got {}", dir, kPrefix, kSuffixA, kSuffixB, stored.name);
    const std::string_view suffix = is_a ? kSuffixA : kSuffixB;
    const std::string module = stored.name.substr(kPrefix.size(), stored.name.size() - kPrefix.size() - suffix.size());
    entries_.push_back({canonical_module(family, module) + std::string(suffix), stored});
  }
  std::sort(entries_.begin(), entries_.end(), [](const Entry& a, const Entry& b) { return a.name < b.name; });
  const auto twice = std::adjacent_find(entries_.begin(), entries_.end(),
                                        [](const Entry& a, const Entry& b) { return a.name == b.name; });
  MOEBIUS_CHECK(input, twice == entries_.end(), "adapter {}: expected a tensor once; got {} and {}, which are the same",
                dir, twice->stored.name, std::next(twice)->stored.name);
}

}  // namespace moebius
