// Characters of UTF-8 text and the classes that tokenizers need, as they are in Unicode 16.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// Returns the character at `*at` and moves `*at` past it. REQUIRES: valid UTF-8 and *at < text.size().
char32_t next_char(std::string_view text, size_t* at);
// Returns where the last character before `end` begins. REQUIRES: valid UTF-8 and end > 0.
size_t previous_char(std::string_view text, size_t end);
void append_utf8(char32_t character, std::string* text);

char32_t lower_case(char32_t character);  // a single character; the result for U+0130 has no dot

bool is_white_space(char32_t character);  // the property White_Space
bool is_numeric(char32_t character);      // Nd, Nl, No
bool is_punctuation(char32_t character);  // P as of Unicode 8, and the ASCII symbols $+<=>^`|~

// Replaces each longest part of a broken sequence by one U+FFFD, as the Unicode standard recommends
// (section 3.9).
std::string replace_invalid_utf8(std::string_view text);

}  // namespace moebius
