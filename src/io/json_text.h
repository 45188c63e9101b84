// Strict JSON text: what the library would let pass in silence (a key used twice, endless nesting) is an error here.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace moebius {

// Error{input} "WHO: expected JSON ..." with the place, unless the text is one value in valid UTF-8 with distinct keys,
// nested at most 100 deep. `who` is the file, or file:line.
nlohmann::json parse_json(std::string_view text, const std::string& who);
nlohmann::json read_json(const std::string& path);

}  // namespace moebius
