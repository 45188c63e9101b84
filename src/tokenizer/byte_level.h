// The alphabet of byte-level tokenizers, which writes each byte as one printable character.
// Bytes 33-126, 161-172 and 174-255 are written as the character of the same number.
// The n-th of the other bytes is written as character 256 + n.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace moebius {

char32_t byte_level_char(uint8_t byte);
std::optional<uint8_t> byte_of_level_char(char32_t character);

// Returns the bytes that a token represents, or nothing when one of its characters is
// outside the alphabet.
std::optional<std::string> byte_level_bytes(std::string_view token);

}  // namespace moebius
