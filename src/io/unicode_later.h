// The differences between the Unicode tables of Hugging Face's library and those of
// PCRE2 and utf8proc.
//
// Hugging Face's classes are of Unicode 16, its lower case of Unicode 17.
// PCRE2 and utf8proc have the tables of their installed versions, Unicode 14 or later.
// A "later" character came after Unicode 14, or is still unassigned.
// PCRE2 and utf8proc never see one: an older character replaces it.
// Hugging Face normalizes by Unicode 12 and takes its punctuation from Unicode 8.
// Characters added after these versions have no form, or are not punctuation, for it.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

bool is_later(char32_t character);  // one look-up, since most characters are tested
// Returns an older character of the same category, Alphabetic property, script and length in UTF-8.
// A character that is not later is returned unchanged.
char32_t substitute(char32_t character);
char32_t later_lower(char32_t character);  // simple lower case; REQUIRES: is_later

// Replaces later characters by their substitutes in `copy`, and returns it; offsets stay the same.
// Returns `text` itself when it holds no later character.
// REQUIRES: valid UTF-8.
std::string_view with_substitutes(std::string_view text, std::string* copy);

bool has_later_form(char32_t character);        // decomposes or has a combining class, but only since Unicode 13
bool is_later_punctuation(char32_t character);  // punctuation, but only since Unicode 9

}  // namespace moebius
