// The keys of a config.json that say what a model computes, their types, and the families that have them. One list: it
// checks config.json files, and it is the list of keys that a recipe's [model] may hold.
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
  // The key that hf_from_model_spec writes instead, for keys that are other spellings of one property; else empty.
  std::string written_as;
  // The families to which null is a value of it: none, or what other keys imply. Elsewhere null is refused: no default
  // stands for it.
  unsigned null_families = 0;
};

const std::vector<HfKey>& hf_keys();
// Those of a config.json alone, for transformers computes with them in every family: with a value that changes nothing,
// or as part of another property. No keys of a recipe.
const std::vector<HfKey>& hf_file_keys();

// Of hf_keys(). Null when no family has the key.
const HfKey* find_hf_key(std::string_view name);
// Whether the key exists and models of this type have it.
bool has_hf_key(std::string_view model_type, std::string_view name);

}  // namespace moebius
