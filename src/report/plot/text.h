// Texts of the page: JSON strings, and numbers in short form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// Returns a JSON string in quotes, which is also safe inside of an HTML script element.
std::string json_string(std::string_view text);
// At most `most` characters; an ellipsis stands for the rest. In UTF-8.
std::string cut_text(std::string_view text, size_t most);

enum class Unit { plain, count, bytes, seconds, ratio };

// For people: "1.2546", "15.6 k", "176.7 MiB", "3.2 ms", "4.0 %".
std::string number_text(double value, Unit unit = Unit::plain);
// For machines and coordinates: the fewest digits that are within 1e-5 of the value.
std::string digits_text(double value);
std::string duration_text_of(double seconds);  // "3 h 20 min", "2 min 05 s", "12.3 s"
std::string time_text(double seconds);         // UTC: "2026-11-23 17:05:40 UTC"

}  // namespace moebius
