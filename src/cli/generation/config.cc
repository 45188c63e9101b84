#include "cli/generation/config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "core/error.h"
#include "io/json_text.h"

namespace moebius {
namespace {

using nlohmann::json;

constexpr uint64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

std::vector<int32_t> end_ids_of(const json& file, int64_t vocab_size, const std::string& path) {
  json ids = file.value("eos_token_id", json());
  if (ids.is_null()) return {};
  if (!ids.is_array()) ids = json::array({ids});
  std::vector<int32_t> ends;
  for (const json& id : ids) {
    MOEBIUS_CHECK(input, id.is_number_integer() && id >= 0, "{}: eos_token_id: expected ids; got {}; correct the file",
                  path, id.dump());
    if (id < vocab_size) ends.push_back(id);
  }
  return ends;
}

// A rule of sampling in a file. An option of the command line replaces it, and then it is not read.
struct Rule {
  const json& file;
  const std::string& path;
  const char* key;
  const char* expected;  // the values that is_legal holds for, in words

  template <class Number, class IsLegal>
  void read(std::optional<Number>* rule, bool is_given, const IsLegal& is_legal) const {
    const json value = file.value(key, json());
    if (is_given || value.is_null()) return;
    const bool is_kind = std::is_integral_v<Number> ? value.is_number_integer() : value.is_number();
    const bool fits = !value.is_number_unsigned() || value.get<uint64_t>() <= kMaxInt64;
    std::string option = key;
    std::replace(option.begin(), option.end(), '_', '-');
    MOEBIUS_CHECK(input, is_kind && fits && is_legal(value.get<Number>()),
                  "{}: {}: expected {}; got {}; correct the file, or give --{}", path, key, expected, value.dump(),
                  option);
    *rule = value.get<Number>();
  }
};

bool is_probability(double p) { return p >= 0 && p <= 1; }

SamplingChoices sampling_in(const json& file, const SamplingChoices& given, const std::string& path) {
  SamplingChoices found;
  const json sample = file.value("do_sample", json());
  MOEBIUS_CHECK(input, sample.is_null() || sample.is_boolean(),
                "{}: do_sample: expected true or false; got {}; correct the file", path, sample.dump());
  Rule{file, path, "temperature", "a number of at least 0"}.read(&found.temperature, given.temperature.has_value(),
                                                                 [](double t) { return std::isfinite(t) && t >= 0; });
  if (sample == false && !given.temperature) found.temperature = 0;
  Rule{file, path, "top_k", "an integer of at least 0"}.read(&found.top_k, given.top_k.has_value(),
                                                             [](int64_t k) { return k >= 0; });
  Rule{file, path, "top_p", "a number in (0, 1]"}.read(&found.top_p, given.top_p.has_value(),
                                                       [](double p) { return p > 0 && is_probability(p); });
  Rule{file, path, "min_p", "a number in [0, 1]"}.read(&found.min_p, given.min_p.has_value(), is_probability);
  Rule{file, path, "repetition_penalty", "a number above 0"}.read(&found.repetition_penalty,
                                                                  given.repetition_penalty.has_value(),
                                                                  [](double r) { return std::isfinite(r) && r > 0; });
  return found;
}

}  // namespace

GenerationConfig read_generation_config(const std::string& dir, int64_t vocab_size, const SamplingChoices& given) {
  const std::string path = dir + "/generation_config.json";
  std::error_code unreadable;
  if (dir.empty() || !std::filesystem::exists(path, unreadable)) return {};
  const json file = read_json(path);
  MOEBIUS_CHECK(input, file.is_object(), "{}: expected an object; got {}; correct the file", path, file.type_name());
  return {.end_ids = end_ids_of(file, vocab_size, path), .sampling = sampling_in(file, given, path)};
}

Sampling sampling_of(const SamplingChoices& given, const SamplingChoices& otherwise) {
  Sampling s;
  const auto choose = [&](auto choice, auto* value) {
    if (const auto found = given.*choice ? given.*choice : otherwise.*choice) *value = *found;
  };
  choose(&SamplingChoices::temperature, &s.temperature);
  choose(&SamplingChoices::top_k, &s.top_k);
  choose(&SamplingChoices::top_p, &s.top_p);
  choose(&SamplingChoices::min_p, &s.min_p);
  choose(&SamplingChoices::repetition_penalty, &s.repetition_penalty);
  return s;
}

std::string added_rules(const SamplingChoices& given, const SamplingChoices& otherwise) {
  const bool is_greedy = sampling_of(given, otherwise).temperature == 0;
  std::string text;
  const auto add = [&](auto choice, const char* name) {
    if (!(given.*choice) && otherwise.*choice)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, *(otherwise.*choice));
  };
  add(&SamplingChoices::temperature, "temperature");
  if (!is_greedy) {
    add(&SamplingChoices::top_k, "top-k");
    add(&SamplingChoices::top_p, "top-p");
    add(&SamplingChoices::min_p, "min-p");
  }
  add(&SamplingChoices::repetition_penalty, "repetition penalty");
  return text;
}

}  // namespace moebius
