// Removing checkpoints, so that a crash at any moment leaves each whole or gone.
#pragma once

#include <cstdint>
#include <string>

namespace moebius {

// Both REQUIRE that the caller holds the folder's CheckpointLock, and throw Error{io}.

// What saves and removals that died left behind.
void remove_unfinished(const std::string& dir);

// After a save of `step`: keeps the newest `keep` complete ones up to it, and removes what is older than those.
// Checkpoints of later steps are of another history: they neither count nor go.
void prune_before(const std::string& dir, int64_t step, int64_t keep);

}  // namespace moebius
