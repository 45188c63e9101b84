// JSON in and out of templates.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "jinja/value.h"

namespace moebius::jinja {

// Keys keep their order. Integers above 64 bits are an Error{input}.
Value value_of(const nlohmann::ordered_json& json);

}  // namespace moebius::jinja
