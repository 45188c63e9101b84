// A warning before the first step if the disk cannot hold the checkpoints that a run will keep.
#pragma once

#include <cstdint>
#include <optional>

#include "config/check/run_notes.h"
#include "config/run_spec.h"

namespace moebius {

struct CheckpointSpace {
  int64_t bytes = 0;       // bytes of one checkpoint, of all ranks together
  int64_t free_bytes = 0;  // of the file system of run.dir; -1 if unknown
  int64_t num_there = 0;   // checkpoints that the run has already
};

// Returns how many checkpoints the run adds to those that are there, at its peak. A new one is complete before the
// oldest is removed, so there is one more than checkpoint.keep for a while.
int64_t added_checkpoints(const RunSpec& run, int64_t first_step, int64_t num_there);

// Returns a warning if added_checkpoints() need more than the free bytes.
std::optional<RunNote> checkpoint_space_note(const RunSpec& run, int64_t first_step, const CheckpointSpace& space);

}  // namespace moebius
