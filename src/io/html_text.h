// Any bytes as text that HTML and SVG can hold.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

// Returns the text, in which bytes that are not UTF-8 and control characters have become U+FFFD.
std::string valid_utf8(std::string_view text);
// Returns valid_utf8(text) with the characters of HTML markup escaped: for text, and for attributes in quotes.
std::string escape_html(std::string_view text);

}  // namespace moebius
