// Reads any text as a model.safetensors.index.json. It is refused with Error{input}, or gives names
// of files that cannot leave the folder.
#include <cstdlib>
#include <string_view>

#include "core/error.h"
#include "hub/hf_folder.h"

namespace {

void require(bool holds) {
  if (!holds) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto map = moebius::parse_weight_map({reinterpret_cast<const char*>(data), size}, "fuzz");
    require(!map.empty());
    for (const auto& [tensor, file] : map) {
      require(file.ends_with(".safetensors") && file.find('/') == std::string::npos);
      require(file.find("..") == std::string::npos && file.find('\0') == std::string::npos);
    }
  } catch (const moebius::Error& e) {
    require(e.kind() == moebius::ErrorKind::input);
  }
  return 0;
}
