#include "io/utf8.h"

#include <cstring>

namespace moebius {
namespace {

// Returns the bytes of the valid sequence at the front of `s`, 0 if there is none (table 3-7 of the
// Unicode standard).
size_t sequence_bytes(std::string_view s) {
  const auto at = [&](size_t i) { return i < s.size() ? static_cast<uint8_t>(s[i]) : 0; };
  const auto continues = [&](size_t i) { return (at(i) & 0xc0) == 0x80; };
  const uint8_t lead = at(0), second = at(1);
  if (lead < 0x80) return 1;
  if (lead < 0xc2 || !continues(1)) return 0;
  if (lead < 0xe0) return 2;
  if (lead < 0xf0) {
    const bool overlong = lead == 0xe0 && second < 0xa0, surrogate = lead == 0xed && second >= 0xa0;
    return overlong || surrogate || !continues(2) ? 0 : 3;
  }
  const bool overlong = lead == 0xf0 && second<0x90, beyond = lead> 0xf4 || (lead == 0xf4 && second >= 0x90);
  return overlong || beyond || !continues(2) || !continues(3) ? 0 : 4;
}

}  // namespace

int64_t find_invalid_utf8(std::string_view text) {
  for (size_t i = 0; i < text.size();) {
    uint64_t word;
    if (text.size() - i >= sizeof word) {  // eight ASCII bytes at a time
      std::memcpy(&word, text.data() + i, sizeof word);
      if ((word & 0x8080808080808080u) == 0) {
        i += sizeof word;
        continue;
      }
    }
    const size_t bytes = sequence_bytes(text.substr(i, 4));
    if (bytes == 0) return static_cast<int64_t>(i);
    i += bytes;
  }
  return -1;
}

}  // namespace moebius
