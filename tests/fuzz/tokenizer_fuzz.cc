// Reads any text as a tokenizer.json. It is refused with Error{input}, or gives a tokenizer with
// valid ids that decode.
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "tokenizer/hf_tokenizer.h"

namespace {

constexpr std::string_view kText =
    "In the  beginning\n<s> \xC3\xA9"
    "e\xCC\x81 12,345 \xE2\x96\x81 it's \xF0\x9F\x91\x8D a</s>";

void check(bool condition) {
  if (!condition) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto tokenizer = moebius::HfTokenizer::parse({reinterpret_cast<const char*>(data), size}, "no folder",
                                                       moebius::TokenizerOptions{});
    std::vector<int32_t> ids;
    tokenizer->encode(kText, &ids);
    for (const int32_t id : ids) check(0 <= id && id < tokenizer->vocab_size());
    tokenizer->decode(ids);
  } catch (const moebius::Error& error) {
    check(error.kind() == moebius::ErrorKind::input);
  }
  return 0;
}
