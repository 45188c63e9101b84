// Each rank reports what it has written to rank 0 by a file: the manifest of its share, in the folder, once its shards
// are durable. Asynchronous saves run on threads of their own, which must not communicate between ranks, but all ranks
// see the folder.
#pragma once

#include <atomic>
#include <string>
#include <vector>

namespace moebius {

struct CheckpointManifest;

// The progress of the other ranks, for the thread that waits for their files.
struct PartsProgress {
  std::atomic<bool> all_written{false};  // every rank has reported its write; a file that does not appear now is lost
  std::atomic<bool> aborted{false};      // a rank has failed
};

// Writes the manifest of this rank's share into the folder, for rank 0 to read.
void write_part(const std::string& folder, const CheckpointManifest& share, int rank);

// Waits for the parts of ranks 1, 2, ..., removes their files and returns them. Throws Error{io} when
// progress says that they were written and they do not appear, or that a rank has failed.
std::vector<CheckpointManifest> collect_parts(const std::string& folder, int num_ranks, const PartsProgress& progress);

}  // namespace moebius
