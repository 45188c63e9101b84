#include "cli/generation/config.h"

#include <fmt/format.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <type_traits>

#include "core/error.h"
#include "io/json_text.h"

namespace moebius {
namespace {

using nlohmann::json;

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

template <class Number>
void read_number(const json& file, const char* key, const std::string& path, std::optional<Number>* number) {
  const json value = file.value(key, json());
  if (value.is_null()) return;
  MOEBIUS_CHECK(input, std::is_integral_v<Number> ? value.is_number_integer() : value.is_number(),
                "{}: {}: expected a {}number; got {}; correct the file", path, key,
                std::is_integral_v<Number> ? "whole " : "", value.dump());
  *number = value.get<Number>();
}

SamplingChoices sampling_in(const json& file, const std::string& path) {
  SamplingChoices found;
  read_number(file, "temperature", path, &found.temperature);
  read_number(file, "top_k", path, &found.top_k);
  read_number(file, "top_p", path, &found.top_p);
  read_number(file, "min_p", path, &found.min_p);
  read_number(file, "repetition_penalty", path, &found.repetition_penalty);
  try {
    check_sampling(sampling_of(found, {}));
  } catch (const Error& error) {
    MOEBIUS_FAIL(input, "{}: {}; correct the file", path, error.what());
  }
  return found;
}

}  // namespace

GenerationConfig read_generation_config(const std::string& dir, int64_t vocab_size) {
  const std::string path = dir + "/generation_config.json";
  std::error_code unreadable;
  if (dir.empty() || !std::filesystem::exists(path, unreadable)) return {};
  const json file = read_json(path);
  MOEBIUS_CHECK(input, file.is_object(), "{}: expected an object; got {}; correct the file", path, file.type_name());
  return {.end_ids = end_ids_of(file, vocab_size, path), .sampling = sampling_in(file, path)};
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
  std::string text;
  const auto add = [&](auto choice, const char* name) {
    if (!(given.*choice) && otherwise.*choice)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", name, *(otherwise.*choice));
  };
  add(&SamplingChoices::temperature, "temperature");
  add(&SamplingChoices::top_k, "top-k");
  add(&SamplingChoices::top_p, "top-p");
  add(&SamplingChoices::min_p, "min-p");
  add(&SamplingChoices::repetition_penalty, "repetition penalty");
  return text;
}

}  // namespace moebius
