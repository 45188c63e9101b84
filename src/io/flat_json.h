// JSON objects without objects or arrays in them, which is what lines of training text are: read some ten times faster
// than by the general parser.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

namespace moebius {

// The object, as the general parser gives it, when its values are strings, integers of up to 18 digits, true, false or
// null. Nothing for everything else, wrong JSON and keys used twice included: the general parser takes it or says what
// is wrong (io/json_text.h).
std::optional<nlohmann::json> parse_flat_object(std::string_view text);

}  // namespace moebius
