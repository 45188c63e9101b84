// The commit protocol of a save, from tensors in memory to a complete step folder.
//
// Every rank writes its shards into a folder with an unfinished name and reports them: rank 0 in
// memory, the others in a file in the folder (checkpoint/parts.h). Rank 0 then writes the manifest
// and gives the folder its name. Each of these steps is durable before the next begins.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/store.h"
#include "io/safetensors.h"

namespace moebius {

struct CheckpointContent {
  int64_t step = 0;
  const std::vector<NamedTensor>& tensors;
  const nlohmann::json& meta;
};

struct CheckpointWriter {
  int rank = 0, num_ranks = 1;
  int64_t shard_bytes = CheckpointStore::kShardBytes;  // most bytes of a shard with several tensors
  Stream* device = nullptr;                            // stream of the GPU that the tensors are on; null: host memory
  std::byte* piece = nullptr;                          // set with a device: a host buffer of kPieceBytes
};

// Writes the shards of this rank: its slices, without replicas. The text of an Error{io} names the save.
CheckpointManifest write_share(const std::string& folder, const CheckpointContent& content,
                               const CheckpointWriter& writer);

// Turns a folder in which all shards are written into the checkpoint of manifest.step. The rename
// at its end replaces a checkpoint of the same step in one atomic operation.
void publish_checkpoint(const std::string& dir, const std::string& unfinished, const CheckpointManifest& manifest);

// These are the steps of a save, for callers that make a folder of their own.
// Returns the name of the next shard.
std::string shard_name(const CheckpointManifest& manifest, const CheckpointWriter& writer = {});
// Closes a written shard, whose tensors are whole, and enters it in the manifest.
void close_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 SafetensorsWriter& writer);
// Writes the manifest, which is the last file of a checkpoint.
void write_manifest(const std::string& folder, const std::string& text);

}  // namespace moebius
