// Where the tables of Hugging Face's library differ from those of PCRE2 and utf8proc, whatever their versions.
//
// Its classes are of Unicode 16, its lower case of 17; ours of the installed libraries, 14 or later. A character that
// came after 14 ("later"; also one that is still unassigned) is therefore never shown to them: an older one stands in.
// It normalizes by the tables of Unicode 12, and takes its punctuation from those of Unicode 8: characters that came
// after these are plain to it.
#pragma once

#include <string>
#include <string_view>

namespace moebius {

bool is_later(char32_t character);  // not as in Unicode 14; most characters are asked about, so it is one look-up
// An older character of the same category, Alphabetic property, script and length in UTF-8; itself if not later.
char32_t stand_in(char32_t character);
char32_t later_lower(char32_t character);  // simple lower case; REQUIRES: is_later

// `text` with stand-ins, written to `copy`, or `text` itself when it holds no later character: offsets are the same.
// REQUIRES: valid UTF-8.
std::string_view with_stand_ins(std::string_view text, std::string* copy);

bool has_later_form(char32_t character);        // decomposes or has a combining class, since after Unicode 12
bool is_later_punctuation(char32_t character);  // punctuation, since after Unicode 8

}  // namespace moebius
