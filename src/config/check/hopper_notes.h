// Notes on keys of a recipe that only Hopper GPUs can run. `config` and `plan` print them, since the run may be on
// another machine.
#pragma once

#include <string>
#include <vector>

#include "config/run_spec.h"

namespace moebius {

// Returns a note for precision.recipe = "fp8_block", for optimizer.fuse_grad and for a split batch
// (batch_split_check.h), if the run is on a GPU.
std::vector<std::string> hopper_notes(const RunSpec& run);

}  // namespace moebius
