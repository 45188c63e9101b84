// The parts of model_spec.h's conversion between ModelSpec and config.json that recipes need.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "config/model_spec.h"
#include "core/error.h"

namespace moebius {

// model_spec_from_hf with errors of the given kind: input for a config.json, usage for keys
// in a recipe.
ModelSpec read_hf_config(const nlohmann::json& config, const std::string& who, ErrorKind kind);

// Returns the keys of spec's family with their values, in the order of hf_keys(). Each property has one
// spelling. The value is null if the family's spelling of "none" is null.
std::vector<std::pair<std::string, nlohmann::json>> hf_values(const ModelSpec& spec);

// Throws Error{usage} unless the keys of spec.family read back to spec, so that the family can
// express this model.
void check_family(const ModelSpec& spec);

}  // namespace moebius
