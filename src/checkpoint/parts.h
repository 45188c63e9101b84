// How rank 0 learns what the other ranks have written: each leaves the manifest of
// its share in the folder, durable, when its shards are. Saves run behind training
// on threads of their own, which may not communicate; the folder is shared.
#pragma once

#include <string>
#include <vector>

#include "checkpoint/manifest.h"

namespace moebius {

// Leaves what this rank wrote for rank 0 to find.
void write_part(const std::string& folder, const CheckpointManifest& share, int rank);

// Waits for the parts of ranks 1, 2, ... and returns them, the files gone. Error{io} when progress says that they were
// written and they are not to be seen, or that a rank has failed.
std::vector<CheckpointManifest> take_parts(const std::string& folder, int num_ranks, const PartsProgress& progress);

}  // namespace moebius
