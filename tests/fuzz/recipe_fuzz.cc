// Reads any text as a recipe. It loads, or ends in an Error of kind usage. A recipe that loads and
// passes its check prints to one that reads back to the same spec, and its sizes can be computed.
#include <cstdlib>
#include <string>

#include "config/run_spec.h"
#include "core/error.h"

namespace {

using namespace moebius;

void require(bool holds) {
  if (!holds) std::abort();
}

// The two lines before the first empty line, if there is one, are overrides.
RunSpec parse(const std::string& text) {
  const size_t end = text.find("\n\n");
  if (end == std::string::npos || text.find('=') == std::string::npos) return parse_run_spec(text, "fuzz", {});
  return parse_run_spec(text.substr(end + 2), "fuzz", {text.substr(0, end)});
}

void check_round_trip(RunSpec spec) {
  RunSpec again = parse_run_spec(to_toml(spec, true), "again", {});
  require(train_identity(again) == train_identity(spec));
  require(config_diff(again, spec).empty());
  spec.provenance.clear();
  again.provenance.clear();
  require(again == spec);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  if (text.find("hf") != std::string::npos) return 0;  // model.hf reads files
  try {
    const RunSpec spec = parse(text);
    check_round_trip(spec);
    spec.check(1);
    require(spec.model.num_parameters() >= spec.model.num_active_parameters());
    require(spec.model.train_flops_per_token(spec.train.seq_len) > 0);
  } catch (const Error& e) {
    require(e.kind() == ErrorKind::usage);
  }
  return 0;
}
