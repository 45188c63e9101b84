// A resolved recipe as text, in another form than to_toml of run_spec.h.
#pragma once

#include <string>

#include "config/run_spec.h"

namespace moebius {

// Like to_toml with provenance, but without the keys whose value is the default. A model that
// came from a config.json is printed as model.hf. The text reads back to the same spec as long as
// that folder exists.
std::string changed_toml(const RunSpec& spec);

}  // namespace moebius
