// Strict JSON text:
// repeated keys and very deep nesting, which the library accepts silently, are errors here.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace moebius {

// Parses one JSON value. `who` is the file, or file:line.
// Throws Error{input} "WHO: expected JSON ..." with the position of the error, unless the text is
// one value in valid UTF-8 with distinct keys, nested at most 100 deep.
nlohmann::json parse_json(std::string_view text, const std::string& who);
nlohmann::json read_json(const std::string& path);

}  // namespace moebius
