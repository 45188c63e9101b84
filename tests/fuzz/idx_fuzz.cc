// Reads any bytes as a Megatron .idx, for a .bin whose size the first two bytes give. They are
// refused with Error{input}, or give an index whose documents tile the .bin.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "data/token_data.h"

namespace {

void check(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint16_t bin_bytes = 0;
  if (size < sizeof bin_bytes) return 0;
  std::memcpy(&bin_bytes, data, sizeof bin_bytes);
  const std::string_view idx(reinterpret_cast<const char*>(data) + sizeof bin_bytes, size - sizeof bin_bytes);
  try {
    const moebius::TokenIndex index = moebius::parse_token_index(idx, bin_bytes, "fuzz.idx");
    const auto& begins = index.document_begins;
    check(begins.size() >= 2 && begins.front() == 0 && std::is_sorted(begins.begin(), begins.end()));
    check(begins.back() * size_of(index.type) == bin_bytes);
  } catch (const moebius::Error& error) {
    check(error.kind() == moebius::ErrorKind::input);
  }
  return 0;
}
