#include "io/unicode.h"

#include <utf8proc.h>

#include <algorithm>

#include "io/unicode_later.h"

namespace moebius {
namespace {

// A byte sequence at the front of a text, by table 3-7 of the Unicode standard:
// how many of its bytes are well-formed, and how many it needs.
struct Sequence {
  size_t good = 0, needed = 1;
};

Sequence sequence_at(std::string_view s) {
  const auto lead = static_cast<uint8_t>(s[0]);
  if (lead < 0x80) return {1, 1};
  if (lead < 0xc2 || lead > 0xf4) return {0, 1};
  const size_t needed = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  const uint8_t low = lead == 0xe0 ? 0xa0 : lead == 0xf0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xed ? 0x9f : lead == 0xf4 ? 0x8f : 0xbf;
  size_t good = 1;
  for (; good < std::min(needed, s.size()); ++good) {
    const auto byte = static_cast<uint8_t>(s[good]);
    if (byte < (good == 1 ? low : 0x80) || byte > (good == 1 ? high : 0xbf)) break;
  }
  return {good, needed};
}

utf8proc_category_t category(char32_t character) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(substitute(character)));
}

}  // namespace

char32_t next_char(std::string_view text, size_t* at) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[*at + i]); };
  const char32_t lead = byte(0);
  if (lead < 0x80) return *at += 1, lead;
  const size_t bytes = lead < 0xe0 ? 2 : lead < 0xf0 ? 3 : 4;
  char32_t character = lead & (0x7fu >> bytes);
  for (size_t i = 1; i < bytes; ++i) character = character << 6 | (byte(i) & 0x3f);
  *at += bytes;
  return character;
}

size_t previous_char(std::string_view text, size_t end) {
  size_t at = end - 1;
  while (at > 0 && (static_cast<uint8_t>(text[at]) & 0xc0) == 0x80) --at;
  return at;
}

void append_utf8(char32_t character, std::string* text) {
  utf8proc_uint8_t bytes[4];
  const auto count = utf8proc_encode_char(static_cast<utf8proc_int32_t>(character), bytes);
  text->append(reinterpret_cast<const char*>(bytes), static_cast<size_t>(count));
}

bool is_white_space(char32_t c) {
  return (c >= 0x9 && c <= 0xd) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200a) ||
         c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f || c == 0x3000;
}

char32_t lower_case(char32_t character) {
  if (is_later(character)) return later_lower(character);
  return static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(character)));
}

bool is_numeric(char32_t character) {
  // These numbers of Unicode 17 are missing in the patterns' classes:
  // digits of Tolong Siki, and ideographic numbers.
  if ((character >= 0x11de0 && character <= 0x11de9) || (character >= 0x16ff4 && character <= 0x16ff6)) return true;
  const auto c = category(character);
  return c >= UTF8PROC_CATEGORY_ND && c <= UTF8PROC_CATEGORY_NO;
}

bool is_punctuation(char32_t character) {
  constexpr char32_t kCanadianChi = 0x166d, kSharadaMark = 0x111c9;  // punctuation in Unicode 8, but no longer
  if (character == kCanadianChi || character == kSharadaMark) return true;
  const auto c = category(character);
  if (character < 0x80 && c >= UTF8PROC_CATEGORY_SM && c <= UTF8PROC_CATEGORY_SO) return true;
  return c >= UTF8PROC_CATEGORY_PC && c <= UTF8PROC_CATEGORY_PO && !is_later_punctuation(character);
}

std::string replace_invalid_utf8(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  while (!text.empty()) {
    const Sequence sequence = sequence_at(text);
    if (sequence.good == sequence.needed) {
      out.append(text.substr(0, sequence.good));
    } else {
      out.append("\xEF\xBF\xBD");
    }
    text.remove_prefix(std::max<size_t>(sequence.good, 1));
  }
  return out;
}

}  // namespace moebius
