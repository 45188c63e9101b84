// A note on moments that optimizer.state = "8bit" leaves in f32: those of vectors, and of matrices whose rows do not
// consist of whole blocks.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "config/check/run_notes.h"
#include "config/run_spec.h"

namespace moebius {

// The trained elements of a model, and those of them whose moments are f32.
struct BlockStates {
  int64_t trained = 0, in_f32 = 0;
  std::string largest;  // the name of the largest tensor in f32; empty if there is none
  double share_in_f32() const { return trained > 0 ? static_cast<double>(in_f32) / static_cast<double>(trained) : 0; }
};

// REQUIRES: run.check() has passed. Returns zeros in in_f32 with another optimizer.state.
BlockStates block_states(const RunSpec& run);

// Returns a note if more than a hundredth of the moments is f32; a warning if more than half of them are.
std::optional<RunNote> block_states_note(const RunSpec& run);

}  // namespace moebius
