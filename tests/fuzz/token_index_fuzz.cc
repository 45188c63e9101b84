// The .idx of a token dataset: any bytes give documents that tile the .bin, or Error{input}.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "io/token_data.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int64_t kBinBytes = 20;  // as behind the indexes of the corpus
  try {
    const std::string_view idx(reinterpret_cast<const char*>(data), size);
    const moebius::TokenIndex index = moebius::parse_token_index(idx, kBinBytes, "fuzz");
    const auto& begins = index.document_begins;
    if (begins.size() < 2 || begins.front() != 0 || !std::is_sorted(begins.begin(), begins.end())) std::abort();
    if (begins.back() * moebius::size_of(index.type) != kBinBytes) std::abort();
  } catch (const moebius::Error& e) {
    if (e.kind() != moebius::ErrorKind::input) std::abort();
  }
  return 0;
}
