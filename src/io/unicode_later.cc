#include "io/unicode_later.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <span>
#include <vector>

#include "io/unicode.h"
#include "io/unicode_later_table.h"

namespace moebius {
namespace {

struct Range {
  char32_t first, last;
};

// Found by comparing the library (tokenizers 0.23.2) with utf8proc 2.8 on every character.
constexpr Range kLaterForms[] = {
    {0x7fd, 0x7fd},     {0x898, 0x89f},     {0x8ca, 0x8d3},     {0x9fe, 0x9fe},     {0xc3c, 0xc3c},
    {0xd3b, 0xd3c},     {0xeba, 0xeba},     {0x1715, 0x1715},   {0x1abf, 0x1ace},   {0x1df6, 0x1dfa},
    {0x32ff, 0x32ff},   {0xa7f2, 0xa7f4},   {0xa82c, 0xa82c},   {0xab69, 0xab69},   {0x10781, 0x10785},
    {0x10787, 0x107b0}, {0x107b2, 0x107ba}, {0x10d24, 0x10d27}, {0x10eab, 0x10eac}, {0x10efd, 0x10eff},
    {0x10f46, 0x10f50}, {0x10f82, 0x10f85}, {0x11070, 0x11070}, {0x1133b, 0x1133b}, {0x1145e, 0x1145e},
    {0x11839, 0x1183a}, {0x11938, 0x11938}, {0x1193d, 0x1193e}, {0x11943, 0x11943}, {0x119e0, 0x119e0},
    {0x11a34, 0x11a34}, {0x11a47, 0x11a47}, {0x11a99, 0x11a99}, {0x11d42, 0x11d42}, {0x11d44, 0x11d45},
    {0x11d97, 0x11d97}, {0x11f41, 0x11f42}, {0x16ff0, 0x16ff1}, {0x1e030, 0x1e06d}, {0x1e08f, 0x1e08f},
    {0x1e130, 0x1e136}, {0x1e2ae, 0x1e2ae}, {0x1e2ec, 0x1e2ef}, {0x1e4ec, 0x1e4ef}, {0x1f16c, 0x1f16c},
    {0x1fbf0, 0x1fbf9}};
constexpr Range kLaterPunctuation[] = {{0x61d, 0x61d},     {0x9fd, 0x9fd},     {0xa76, 0xa76},     {0xc77, 0xc77},
                                       {0xc84, 0xc84},     {0x1b7d, 0x1b7e},   {0x2e43, 0x2e4f},   {0x2e52, 0x2e5d},
                                       {0x10ead, 0x10ead}, {0x10f55, 0x10f59}, {0x10f86, 0x10f89}, {0x1144b, 0x1144f},
                                       {0x1145a, 0x1145b}, {0x1145d, 0x1145d}, {0x11660, 0x1166c}, {0x116b9, 0x116b9},
                                       {0x1183b, 0x1183b}, {0x11944, 0x11946}, {0x119e2, 0x119e2}, {0x11a3f, 0x11a46},
                                       {0x11a9a, 0x11a9c}, {0x11a9e, 0x11aa2}, {0x11b00, 0x11b09}, {0x11c41, 0x11c45},
                                       {0x11c70, 0x11c71}, {0x11ef7, 0x11ef8}, {0x11f43, 0x11f4f}, {0x11fff, 0x11fff},
                                       {0x12ff1, 0x12ff2}, {0x16e97, 0x16e9a}, {0x16fe2, 0x16fe2}, {0x1e95e, 0x1e95f}};

// A set of characters, one bit each.
class LaterSet {
 public:
  LaterSet() : words_(0x110000 / 64) {
    for (const LaterRange& range : kLaterRanges)
      for (char32_t c = range.first; c <= range.last; ++c) words_[c / 64] |= uint64_t{1} << c % 64;
  }
  bool holds(char32_t c) const { return (words_[c / 64] >> c % 64 & 1) != 0; }

 private:
  std::vector<uint64_t> words_;
};

const LaterSet& later_set() {
  static const LaterSet set;
  return set;
}

// Later characters have three or four bytes in UTF-8. Only such sequences begin with
// three bits set.
bool is_long_lead(char c) { return static_cast<uint8_t>(c) >= 0xe0; }

size_t next_long_lead(std::string_view text, size_t at) {
  uint64_t word;
  for (; at + sizeof word <= text.size(); at += sizeof word) {
    std::memcpy(&word, text.data() + at, sizeof word);
    if ((word & word << 1 & word << 2 & 0x8080808080808080u) != 0) break;
  }
  while (at < text.size() && !is_long_lead(text[at])) ++at;
  return at;
}

size_t next_later(std::string_view text, size_t at) {
  const LaterSet& set = later_set();
  for (at = next_long_lead(text, at); at < text.size();) {
    const size_t begin = at;
    if (set.holds(next_char(text, &at))) return begin;
    if (at < text.size() && !is_long_lead(text[at])) at = next_long_lead(text, at);
  }
  return text.size();
}

bool holds(std::span<const Range> ranges, char32_t character) {
  const auto next = std::upper_bound(ranges.begin(), ranges.end(), character,
                                     [](char32_t c, const Range& range) { return c < range.first; });
  return next != ranges.begin() && character <= std::prev(next)->last;
}

}  // namespace

bool is_later(char32_t character) { return later_set().holds(character); }

char32_t substitute(char32_t character) {
  if (!is_later(character)) return character;
  return std::lower_bound(std::begin(kLaterRanges), std::end(kLaterRanges), character,
                          [](const LaterRange& range, char32_t c) { return range.last < c; })
      ->substitute;
}

char32_t later_lower(char32_t character) {
  for (const LaterLower& pair : kLaterLower)
    if (pair.upper == character) return pair.lower;
  return character;
}

std::string_view with_substitutes(std::string_view text, std::string* copy) {
  size_t at = next_later(text, 0);
  if (at == text.size()) return text;
  copy->assign(text, 0, at);
  while (at < text.size()) {
    append_utf8(substitute(next_char(text, &at)), copy);
    const size_t next = next_later(text, at);
    copy->append(text, at, next - at);
    at = next;
  }
  return *copy;
}

bool has_later_form(char32_t character) { return is_later(character) || holds(kLaterForms, character); }
bool is_later_punctuation(char32_t character) { return is_later(character) || holds(kLaterPunctuation, character); }

}  // namespace moebius
