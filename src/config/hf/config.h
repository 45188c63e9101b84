// Between ModelSpec and the keys of a config.json: what model_spec.h declares, in the parts that recipes need.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "config/model_spec.h"
#include "core/error.h"

namespace moebius {

// model_spec_from_hf with the kind of its errors: input for a config.json, usage for keys in a recipe.
ModelSpec read_hf_config(const nlohmann::json& config, const std::string& who, ErrorKind kind);

// The keys of spec's family with their values, in the order of hf_keys(): one spelling per property, null where the
// family says "none" by null.
std::vector<std::pair<std::string, nlohmann::json>> hf_values(const ModelSpec& spec);

// Error{usage} unless the keys of spec.family read back to spec: the family can say what this model is.
void check_family(const ModelSpec& spec);

}  // namespace moebius
