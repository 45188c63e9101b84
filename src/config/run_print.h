// A resolved recipe as text, beside to_toml of run_spec.h.
#pragma once

#include <string>

#include "config/run_spec.h"

namespace moebius {

// As to_toml with provenance, but only the keys that have no default: what the recipe, --set and other keys
// say, and model.hf for a model that came from a config.json. Reads back to the same spec where that folder
// still is.
std::string changed_toml(const RunSpec& spec);

}  // namespace moebius
