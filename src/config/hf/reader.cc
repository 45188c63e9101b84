#include "config/hf/reader.h"

#include <algorithm>

#include "config/model_spec.h"

namespace moebius {

using nlohmann::json;

HfReader::HfReader(const json& config, std::string who, ErrorKind kind)
    : config_(config), who_(std::move(who)), kind_(kind) {
  if (!config.is_object()) fail("expected a JSON object; got {}", shown(config));
  const json type = config.value("model_type", json());
  if (!type.is_string() || family_bit(type.get<std::string>()) == 0) {
    fail("model_type must be one of \"{}\"; got {}", fmt::join(model_families(), "\", \""), shown(type));
  }
  family_ = type.get<std::string>();
  for (const HfKey& key : hf_keys()) check_type(key);
  for (const HfKey& key : hf_file_keys()) check_type(key);
}

bool HfReader::present(const std::string& key) const {
  const auto& of_file = hf_file_keys();
  const unsigned family = family_bit(family_);
  const bool known = has_hf_key(family_, key) || std::any_of(of_file.begin(), of_file.end(), [&](const HfKey& each) {
                       return each.name == key && (each.families & family);
                     });
  return known && config_.contains(key);
}
bool HfReader::has(const std::string& key) const { return present(key) && !config_.at(key).is_null(); }
bool HfReader::is_null(const std::string& key) const { return present(key) && config_.at(key).is_null(); }

void HfReader::check_type(const HfKey& key) const {
  if (is_null(key.name) && !(key.null_families & family_bit(family_)))
    fail("{} must be {}; got null; give it, or remove the key", key.name, key.rule.expects);
  if (!has(key.name)) return;
  const json& value = config_.at(key.name);
  if (!key.rule.accepts(value)) fail("{} must be {}; got {}", key.name, key.rule.expects, shown(value));
}

}  // namespace moebius
