// Numbers in the files of a dataset, which are unaligned and in the byte order of this machine (little-endian).
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace moebius {

// Returns the T at a byte offset. REQUIRES: offset + sizeof(T) <= bytes.size().
template <class T>
T load(std::string_view bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

// Appends the bytes of a value.
template <class T>
void store(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace moebius
