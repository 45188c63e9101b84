#include "tokenizer/byte_level.h"

#include "io/unicode.h"

namespace moebius {
namespace {

// The bytes that are not written as the character of the same number are 0-32, 127-160 and 173.
constexpr int kFirst = 33, kSecondBegin = 127, kSecondEnd = 161, kLast = 173;
constexpr int kSecond = kSecondEnd - kSecondBegin;

}  // namespace

char32_t byte_level_char(uint8_t byte) {
  if (byte < kFirst) return 256 + byte;
  if (byte >= kSecondBegin && byte < kSecondEnd) return 256 + kFirst + byte - kSecondBegin;
  if (byte == kLast) return 256 + kFirst + kSecond;
  return byte;
}

std::optional<uint8_t> byte_of_level_char(char32_t character) {
  const int c = static_cast<int>(character), other = c - 256;
  if (c < 256) {
    if (byte_level_char(static_cast<uint8_t>(c)) != character) return std::nullopt;
    return static_cast<uint8_t>(c);
  }
  if (other < kFirst) return static_cast<uint8_t>(other);
  if (other < kFirst + kSecond) return static_cast<uint8_t>(kSecondBegin + other - kFirst);
  if (other == kFirst + kSecond) return static_cast<uint8_t>(kLast);
  return std::nullopt;
}

std::optional<std::string> byte_level_bytes(std::string_view token) {
  std::string bytes;
  for (size_t at = 0; at < token.size();) {
    const auto byte = byte_of_level_char(next_char(token, &at));
    if (!byte) return std::nullopt;
    bytes.push_back(static_cast<char>(*byte));
  }
  return bytes;
}

}  // namespace moebius
