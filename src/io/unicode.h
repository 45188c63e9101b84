// Characters of UTF-8 text and the classes that tokenizers ask for, as they are in Unicode 16.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace moebius {

// The character at `*at`, which moves past it. REQUIRES: valid UTF-8 and *at < text.size().
char32_t next_char(std::string_view text, size_t* at);
// Where the last character before `end` begins. REQUIRES: valid UTF-8 and end > 0.
size_t previous_char(std::string_view text, size_t end);
void append_utf8(char32_t character, std::string* text);

char32_t lower_case(char32_t character);  // of one character, U+0130's less its dot

bool is_white_space(char32_t character);  // the property White_Space
bool is_numeric(char32_t character);      // Nd, Nl, No
bool is_punctuation(char32_t character);  // P as of Unicode 8, and the ASCII symbols $+<=>^`|~

// Each longest part of a broken sequence as one U+FFFD, as the Unicode standard recommends (section 3.9).
std::string replace_invalid_utf8(std::string_view text);

}  // namespace moebius
