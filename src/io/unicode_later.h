// What Hugging Face's library does not know yet: it normalizes by the tables of Unicode 12, and takes its punctuation
// from those of Unicode 8. Characters that came later are plain to it.
#pragma once

namespace moebius {

bool has_later_form(char32_t character);        // decomposes or has a combining class, since after Unicode 12
bool is_later_punctuation(char32_t character);  // punctuation, since after Unicode 8

}  // namespace moebius
