#include "config/recipe/memory_keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

#include "config/nearest.h"

namespace moebius {

using nlohmann::json;

namespace {

// The name of RunSpec::offload_weights in memory.offload.
constexpr const char* kWeightsName = "weights";
// More layers than a model may have.
constexpr int64_t kMaxLayers = 1'000'000;
constexpr std::pair<const char*, int64_t> kUnits[] = {{"TiB", int64_t{1} << 40},
                                                      {"GiB", int64_t{1} << 30},
                                                      {"MiB", int64_t{1} << 20},
                                                      {"KiB", int64_t{1} << 10},
                                                      {"TB", 1'000'000'000'000},
                                                      {"GB", 1'000'000'000},
                                                      {"MB", 1'000'000},
                                                      {"KB", 1'000},
                                                      {"B", 1}};
// Names in the paper and in Megatron Core that are different or do not exist here.
constexpr std::pair<const char*, const char*> kOtherNames[] = {
    {"moe_act", "; outputs of the experts' activation are never kept, so there is nothing to name"},
    {"layernorm", "; here that is \"norm\""},
    {"core_attn", "; here that is \"attention\""},
    {"shared_experts", "; here that is \"shared_expert\""},
    {"moe", "; here that is \"expert_up\""},
    {"full", "; here that is \"layer\""},
};

// The same for memory.offload: Megatron Core names modules, of which it moves the inputs.
constexpr std::pair<const char*, const char*> kOtherOffloadNames[] = {
    {"attn_norm", "; its input is \"layer_input\" here"},
    {"qkv_linear", "; its input is \"norm\" here"},
    {"core_attn", "; its input is \"qkv\" here"},
    {"attn_proj", "; its input is \"attention\" here"},
    {"mlp_norm", "; its input is moved only by \"layer\" here"},
    {"expert_fc1", "; rows of experts are gathered where they are used, so there is nothing to move"},
    {"moe_act", "; its input is \"expert_up\" here"},
};

std::optional<int64_t> parse_layer(const std::string& text) {
  int64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || end != text.data() + text.size() || value < 0 || value > kMaxLayers) return {};
  return value;
}

// "0-3" or "7"; the first layer is at least `least`.
std::optional<RecomputeRange> parse_range(const std::string& text, int64_t least) {
  const size_t dash = text.find('-');
  const std::optional<int64_t> first = parse_layer(text.substr(0, dash));
  const std::optional<int64_t> last = dash == text.npos ? first : parse_layer(text.substr(dash + 1));
  if (!first || !last || *first < least || *last < *first) return {};
  return RecomputeRange{.first = *first, .last = *last};
}

// Adds the ranges after the colon to `to`. A range that follows another one at once extends it.
bool parse_ranges(const std::string& text, bool RecomputeSpec::*what, std::vector<RecomputeRange>& to) {
  int64_t least = 0;
  for (size_t begin = 0; begin <= text.size();) {
    const size_t end = std::min(text.find(',', begin), text.size());
    std::optional<RecomputeRange> range = parse_range(text.substr(begin, end - begin), least);
    if (!range) return false;
    range->what = what;
    const bool continues = least > 0 && range->first == least;
    least = range->last + 1;
    if (continues)
      to.back().last = range->last;
    else
      to.push_back(*range);
    begin = end + 1;
  }
  return true;
}

std::string name_part(const std::string& text) { return text.substr(0, text.find(':')); }

std::vector<std::string> known_names() {
  std::vector<std::string> names;
  for (const auto& [name, field] : kRecomputeNames) names.emplace_back(name);
  return names;
}

std::optional<std::vector<std::string>> texts_of(const json& v) {
  std::vector<std::string> texts;
  if (!v.is_array()) return {};
  for (const json& each : v) {
    if (!each.is_string()) return {};
    texts.push_back(each.get<std::string>());
  }
  return texts;
}

std::vector<std::string> known_offload_names() {
  std::vector<std::string> names = known_names();
  names.insert(names.begin(), kLayerInputName);
  names.emplace_back(kWeightsName);
  return names;
}

// The names of memory.offload: those of activations, and whether the weights of layers are named.
struct OffloadNames {
  std::vector<std::string> activations;
  bool weights = false;
};

OffloadNames split_names(std::vector<std::string> texts) {
  const auto at = std::find(texts.begin(), texts.end(), kWeightsName);
  const bool weights = at != texts.end();
  if (weights) texts.erase(at);
  return {.activations = std::move(texts), .weights = weights};
}

std::string offload_hint(const json& v) {
  const std::vector<std::string> names = known_offload_names();
  for (const json& each : v.is_array() ? v : json::array({v})) {
    if (!each.is_string()) continue;
    const std::string text = each.get<std::string>(), name = name_part(text);
    for (const auto& [other, hint] : kOtherOffloadNames)
      if (name == other) return hint;
    if (std::find(names.begin(), names.end(), name) == names.end()) {
      const std::string near = nearest_if_near(name, names);
      return near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near);
    }
    if (name != text) return "; a name is for all layers, and memory.offload_fraction says how many of them";
  }
  return "";
}

std::string recompute_hint(const json& v) {
  for (const json& each : v.is_array() ? v : json::array({v})) {
    if (!each.is_string()) continue;
    const std::string name = name_part(each.get<std::string>());
    for (const auto& [other, hint] : kOtherNames)
      if (name == other) return hint;
    std::vector<std::string> names = known_names();
    if (std::find(names.begin(), names.end(), name) != names.end()) continue;
    if (!v.is_array()) names.emplace_back("auto");
    const std::string near = nearest_if_near(name, names);
    return near.empty() ? "" : fmt::format("; did you mean \"{}\"?", near);
  }
  return "";
}

// Returns a key with a number, or "auto" for none. field: returns the optional number of a run.
template <class Field>
RecipeKey number_or_auto(const char* name, Field field) {
  const ValueRule number = float_or_zero(1e6);
  const auto accepts = [number](const json& v) { return v == "auto" || number.accepts(v); };
  const auto read = [field](RunSpec& s, const json& v) {
    field(s) = v == "auto" ? std::nullopt : std::optional(v.get<double>());
  };
  const auto write = [field](const RunSpec& s) { return field(s) ? json(*field(s)) : json("auto"); };
  return {name, {number.expects + ", or \"auto\"", accepts}, read, write, Resume::free};
}

}  // namespace

std::optional<RecomputeSpec> parse_recompute(const std::vector<std::string>& texts) {
  RecomputeSpec spec;
  size_t num_known = 0;
  for (const auto& [name, field] : kRecomputeNames) {
    int count = 0;
    for (const std::string& text : texts) {
      if (name_part(text) != name) continue;
      ++count;
      ++num_known;
      const size_t colon = text.find(':');
      if (colon == text.npos)
        spec.*field = true;
      else if (!parse_ranges(text.substr(colon + 1), field, spec.ranges))
        return {};
    }
    if (count > 1) return {};
  }
  if (num_known != texts.size()) return {};
  return spec;
}

std::optional<OffloadSpec> parse_offload(const std::vector<std::string>& texts) {
  OffloadSpec spec;
  for (const std::string& text : texts) {
    bool* flag = text == kLayerInputName ? &spec.layer_input : nullptr;
    for (const auto& [name, field] : kRecomputeNames)
      if (text == name) flag = &(spec.tensors.*field);
    if (!flag || *flag) return {};
    *flag = true;
  }
  return spec;
}

std::vector<std::string> offload_texts(const OffloadSpec& offload) {
  std::vector<std::string> texts = recompute_texts(offload.tensors);
  if (offload.layer_input) texts.insert(texts.begin(), kLayerInputName);
  return texts;
}

namespace {

std::vector<std::string> all_offload_texts(const OffloadSpec& offload, bool weights) {
  std::vector<std::string> texts = offload_texts(offload);
  if (weights) texts.emplace_back(kWeightsName);
  return texts;
}

}  // namespace

std::vector<std::string> recompute_texts(const RecomputeSpec& recompute) {
  std::vector<std::string> texts;
  for (const auto& [name, field] : kRecomputeNames) {
    if (recompute.*field) texts.emplace_back(name);
    std::string ranges;
    for (const RecomputeRange& r : recompute.ranges) {
      if (r.what != field || recompute.*field) continue;
      ranges += ranges.empty() ? ":" : ",";
      ranges += r.first == r.last ? fmt::format("{}", r.first) : fmt::format("{}-{}", r.first, r.last);
    }
    if (!ranges.empty()) texts.push_back(name + ranges);
  }
  return texts;
}

namespace {

std::string list_of(const std::vector<std::string>& texts) {
  std::string list;
  for (const std::string& text : texts) list += fmt::format("{}\"{}\"", list.empty() ? "" : ", ", text);
  return "[" + list + "]";
}

}  // namespace

std::string recompute_list(const RecomputeSpec& recompute) { return list_of(recompute_texts(recompute)); }
std::string offload_list(const OffloadSpec& offload, bool weights) {
  return list_of(all_offload_texts(offload, weights));
}

std::optional<int64_t> parse_bytes(const std::string& text) {
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc{} || !std::isfinite(value)) return {};
  const std::string unit = text.substr(static_cast<size_t>(end - text.data()));
  for (const auto& [name, size] : kUnits) {
    const double bytes = std::round(value * static_cast<double>(size));
    if (unit == name && bytes >= 1 && bytes <= 0x1p60) return static_cast<int64_t>(bytes);
  }
  return {};
}

std::string exact_bytes_text(int64_t bytes) {
  if (bytes == 0) return "";
  std::string best;
  for (const auto& [name, size] : kUnits) {
    if (bytes % size != 0) continue;
    const std::string text = fmt::format("{}{}", bytes / size, name);
    if ((best.empty() || text.size() < best.size()) && parse_bytes(text) == bytes) best = text;
  }
  return best;
}

RecipeKey recompute_key() {
  const auto accepts = [](const json& v) {
    if (v == "auto") return true;
    const auto texts = texts_of(v);
    return texts && parse_recompute(*texts);
  };
  const auto read = [](RunSpec& s, const json& v) {
    s.memory.automatic = v == "auto";
    s.memory.recompute = s.memory.automatic ? RecomputeSpec{} : parse_recompute(*texts_of(v)).value();
  };
  const auto write = [](const RunSpec& s) {
    return s.memory.automatic ? json("auto") : json(recompute_texts(s.memory.recompute));
  };
  const std::string expects =
      fmt::format("a list without repeats of \"{}\", each for all layers or as \"{}:0-3,7\" for some, or \"auto\"",
                  fmt::join(known_names(), "\", \""), kRecomputeNames[0].first);
  return {"memory.recompute", {expects, accepts, recompute_hint}, read, write, Resume::free};
}

RecipeKey offload_key() {
  const auto accepts = [](const json& v) {
    const auto texts = texts_of(v);
    return texts && parse_offload(split_names(*texts).activations);
  };
  const auto read = [](RunSpec& s, const json& v) {
    const double fraction = s.memory.offload.fraction;
    const OffloadNames names = split_names(*texts_of(v));
    s.memory.offload = parse_offload(names.activations).value();
    s.memory.offload.fraction = fraction;
    s.offload_weights = names.weights;
  };
  const auto write = [](const RunSpec& s) { return json(all_offload_texts(s.memory.offload, s.offload_weights)); };
  const std::string expects =
      fmt::format("a list without repeats of \"{}\"", fmt::join(known_offload_names(), "\", \""));
  return {"memory.offload", {expects, accepts, offload_hint}, read, write, Resume::free};
}

RecipeKey offload_fraction_key() {
  const auto accepts = [](const json& v) { return v.is_number() && v.get<double>() > 0 && v.get<double>() <= 1; };
  const auto read = [](RunSpec& s, const json& v) { s.memory.offload.fraction = v.get<double>(); };
  const auto write = [](const RunSpec& s) { return json(s.memory.offload.fraction); };
  return {"memory.offload_fraction", {"a number above 0, at most 1", accepts}, read, write, Resume::free};
}

RecipeKey expert_rows_key() {
  return number_or_auto("memory.expert_rows", [](auto& s) -> decltype(auto) { return (s.memory.expert_rows); });
}

RecipeKey offload_buffer_key() {
  return number_or_auto("optimizer.offload_buffer",
                        [](auto& s) -> decltype(auto) { return (s.optimizer.offload_buffer); });
}

RecipeKey fit_key() {
  const auto accepts = [](const json& v) { return v == "" || (v.is_string() && parse_bytes(v.get<std::string>())); };
  const auto read = [](RunSpec& s, const json& v) {
    s.memory.fit_bytes = parse_bytes(v.get<std::string>()).value_or(0);
  };
  const auto write = [](const RunSpec& s) { return json(exact_bytes_text(s.memory.fit_bytes)); };
  return {"memory.fit",
          {"bytes with a unit, such as \"80GiB\" or \"79.5GB\", or \"\"", accepts},
          read,
          write,
          Resume::free};
}

}  // namespace moebius
