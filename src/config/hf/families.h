// The supported model types. A family is a row here, its keys (hf/keys.h) and its
// tensor names (hub/hf_names.h). One class computes all of them from a ModelSpec.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "config/model_spec.h"

namespace moebius {

enum HfFamilyBit : unsigned {
  kMixtral = 1 << 0,
  kQwen3Moe = 1 << 1,
  kMoebius = 1 << 2,
  kLlama = 1 << 3,
  kMistral = 1 << 4,
  kQwen3 = 1 << 5,
  kQwen2 = 1 << 6,
  kQwen2Moe = 1 << 7,
  kOlmoe = 1 << 8,
  kDeepseekV2 = 1 << 9,
  kDeepseekV3 = 1 << 10,
  kGptOss = 1 << 11,
};
inline constexpr unsigned kDenseFamilies = kLlama | kMistral | kQwen3 | kQwen2;
inline constexpr unsigned kDeepseek = kDeepseekV2 | kDeepseekV3;
inline constexpr unsigned kMoeFamilies = kMixtral | kQwen3Moe | kQwen2Moe | kOlmoe | kDeepseek | kGptOss | kMoebius;
inline constexpr unsigned kAllFamilies = kDenseFamilies | kMoeFamilies;
// Families whose intermediate_size is the width of an expert, since they have no dense layers.
inline constexpr unsigned kExpertWidthIsIntermediate = kMixtral | kOlmoe | kGptOss;

struct ModelFamily {
  std::string name;          // model_type
  std::string architecture;  // its class in transformers; none for "moebius"
  unsigned bit = 0;
  // The values that its config class in transformers assumes for missing keys (5.17; the
  // same in 4.x).
  ModelSpec defaults;
};

// Null if the model type is not known.
const ModelFamily* find_family(std::string_view model_type);
unsigned family_bit(std::string_view model_type);  // 0 if it is not known

}  // namespace moebius
