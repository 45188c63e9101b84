// Reads any text as a config.json. It is refused with Error{input}, or it gives a model whose own
// config.json reads back to the same model. Such a model passes its check or is refused by it.
#include <cstdlib>
#include <string_view>

#include "config/model_spec.h"
#include "core/error.h"
#include "io/json_text.h"

namespace {

using namespace moebius;

void require(bool holds) {
  if (!holds) std::abort();
}

void check_round_trip(ModelSpec spec) {
  ModelSpec again = model_spec_from_hf(hf_from_model_spec(spec), "again");
  again.source = spec.source = {};
  require(again == spec);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  ModelSpec spec;
  try {
    spec = model_spec_from_hf(parse_json({reinterpret_cast<const char*>(data), size}, "fuzz"), "fuzz");
  } catch (const Error& e) {
    require(e.kind() == ErrorKind::input);
    return 0;
  }
  try {
    spec.check();
  } catch (const Error& e) {
    require(e.kind() == ErrorKind::usage);
    return 0;
  }
  check_round_trip(spec);
  require(spec.num_parameters() >= spec.num_active_parameters());
  return 0;
}
