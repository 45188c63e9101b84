// The keys of a config.json that determine what a model computes, their types, and the families
// that have them. This one list checks config.json files, and it is the list of keys that a
// recipe's [model] may hold.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/hf/families.h"
#include "config/recipe/value_rule.h"

namespace moebius {

struct HfKey {
  std::string name;
  ValueRule rule;
  unsigned families;  // HfFamilyBit bits
  // If this is another spelling of a property: the key that hf_from_model_spec writes for
  // it. Else empty.
  std::string written_as;
  // The families in which null is a value of the key: none, or what other keys imply. Other
  // families have no default for null and refuse it.
  unsigned null_families = 0;
};

const std::vector<HfKey>& hf_keys();
// Keys that a config.json may hold and a recipe may not. transformers computes with them in their
// families, so each must have a value that changes nothing, or be a part of another property.
const std::vector<HfKey>& hf_file_keys();

// The entry of hf_keys(); null if no family has the key.
const HfKey* find_hf_key(std::string_view name);
// Returns whether the key exists and models of this type have it.
bool has_hf_key(std::string_view model_type, std::string_view name);

}  // namespace moebius
