// Removes checkpoints. After a crash at any moment each of them is either complete or gone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace moebius {

// Removes every checkpoint older than the newest `keep` ones that verify, and returns their folders;
// none when fewer verify. Throws Error{usage} unless keep >= 1, or when a run has the folder open.
// Throws Error{input} when the folder has no checkpoint: nothing is written to it.
std::vector<std::string> prune_checkpoints(const std::string& dir, int64_t keep);

// The two below REQUIRE that the caller holds the folder's CheckpointLock, and throw Error{io}.

// Removes the folders of saves and removals that did not finish.
void remove_unfinished(const std::string& dir);

// Called after a save of `step`. Removes checkpoints of later steps: they belong to an abandoned
// history, and a run that resumes would take them for its own. keep >= 1: also removes those older
// than the newest `keep` complete ones.
void prune_after_save(const std::string& dir, int64_t step, int64_t keep);

}  // namespace moebius
