// Text for the page: JSON strings, and numbers in short form.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// Returns a JSON string in quotes, which is also safe inside of an HTML script element.
std::string json_string(std::string_view text);
// Returns at most max_chars characters of UTF-8; an ellipsis replaces the rest.
std::string truncated(std::string_view text, size_t max_chars);

enum class Unit { plain, count, bytes, seconds, ratio };

// Returns a number for human readers: "1.2546", "15.6 k", "176.7 MiB", "3.2 ms", "4.0 %".
std::string number_text(double value, Unit unit = Unit::plain);
// Returns a number for machine readers and coordinates: the fewest digits that are within a relative 1e-5 of the value.
std::string digits_text(double value);
std::string duration_text_of(double seconds);  // "3 h 20 min", "2 min 05 s", "12.3 s"
std::string time_text(double seconds);         // UTC: "2026-11-23 17:05:40 UTC"

}  // namespace moebius
