// Reads any bytes as a .targets file, for a dataset whose number of tokens the first two bytes
// give. They are refused with Error{input}, or give rising spans within the dataset that are
// written back unchanged.
#include <cstdlib>
#include <cstring>
#include <string_view>

#include "core/error.h"
#include "data/target_spans.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint16_t num_tokens = 0;
  if (size < sizeof num_tokens) return 0;
  std::memcpy(&num_tokens, data, sizeof num_tokens);
  const std::string_view bytes(reinterpret_cast<const char*>(data) + sizeof num_tokens, size - sizeof num_tokens);
  try {
    const auto spans = moebius::parse_target_spans(bytes, num_tokens, "fuzz");
    for (const auto& span : spans) require(span.begin >= 0 && span.begin < span.end && span.end <= num_tokens);
    require(moebius::target_spans_text(spans, num_tokens) == bytes);
  } catch (const moebius::Error& e) {
    require(e.kind() == moebius::ErrorKind::input);
  }
  return 0;
}
