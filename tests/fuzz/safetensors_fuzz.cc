// The JSON header of a safetensors file: any bytes give a header whose entries lie inside the data, or Error{input}.
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kDataBytes = 48;  // as behind the headers of the corpus
  try {
    const std::string_view json(reinterpret_cast<const char*>(data), size);
    int64_t end = 0;
    for (const moebius::SafetensorsEntry& entry : moebius::parse_safetensors_header(json, kDataBytes, "fuzz").entries) {
      if (entry.offset != end || entry.bytes < 0) std::abort();
      end += entry.bytes;
    }
    if (end != kDataBytes) std::abort();
  } catch (const moebius::Error& e) {
    if (e.kind() != moebius::ErrorKind::input) std::abort();
  }
  return 0;
}
