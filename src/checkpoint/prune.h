// Removing checkpoints, so that a crash at any moment leaves each whole or gone.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

// Both REQUIRE that the caller holds the folder's CheckpointLock, and throw Error{io}.

// What saves and removals that died left behind.
void remove_unfinished(const std::string& dir);

// After a save of `step`. Checkpoints of later steps go: they are of a history that was given up, and a run that
// resumes would take them for its own. keep >= 1: so do those older than the newest `keep` complete ones.
void prune_after_save(const std::string& dir, int64_t step, int64_t keep);

}  // namespace moebius
