// Conversion between JSON and the values of templates.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "jinja/value.h"

namespace moebius::jinja {

// Converts JSON; keys keep their order. Throws Error{input} for integers of more than 64 bits.
Value value_of(const nlohmann::ordered_json& json);

}  // namespace moebius::jinja
