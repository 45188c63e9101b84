// Reads numbers from the files of a dataset: unaligned, in the byte order of
// this machine (little-endian).
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>

namespace moebius {

// REQUIRES: bytes has a T at offset.
template <class T>
T load(std::string_view bytes, int64_t offset) {
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

template <class T>
void store(std::string* out, T value) {
  out->append(reinterpret_cast<const char*>(&value), sizeof value);
}

}  // namespace moebius
