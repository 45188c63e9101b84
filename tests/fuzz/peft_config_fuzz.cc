// Reads any text as an adapter_config.json of PEFT. It is refused with Error{input}, or gives a rank and
// a scale that can be computed with.
#include <cmath>
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "hub/peft.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const moebius::LoraSpec lora = moebius::parse_peft_config({reinterpret_cast<const char*>(data), size}, "fuzz");
    require(lora.rank >= 1 && lora.rank <= 1 << 16 && std::isfinite(lora.scale()) && lora.scale() > 0);
  } catch (const moebius::Error& e) {
    require(e.kind() == moebius::ErrorKind::input);
  }
  return 0;
}
