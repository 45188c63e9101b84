// Notes on keys of a recipe that have less effect than usual on the ranks of a run or none, and on YaRN. `train` logs
// them at its start, and `config` prints them.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "config/run_spec.h"

namespace moebius {

struct RunNote {
  std::string text;
  bool is_warning = false;  // the key has no effect
};

// Returns a note for the weights or gradients of layers that parallel.fsdp and parallel.shard_gradients leave whole on
// each rank, since no other rank holds them; for what memory.offload leaves on the device; for a factor of YaRN that
// the recipe does not give, and for a sequence longer than the positions to which YaRN stretches; for a window of the
// recipe that its model_type does not read. REQUIRES: RunSpec::check() passes for num_ranks.
std::vector<RunNote> run_notes(const RunSpec& run, int64_t num_ranks);

}  // namespace moebius
