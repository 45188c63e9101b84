// One save, from tensors in memory to a step folder that counts: the commit protocol.
//
// Every rank writes its shards into a folder with an unfinished name, and says what it wrote: rank 0 in memory, the
// others in a file beside (checkpoint/parts.h). Rank 0 then writes the manifest and gives the folder its name. Each of
// these is on the device before the next begins.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "io/safetensors.h"

namespace moebius {

struct CheckpointContent {
  int64_t step = 0;
  const std::vector<NamedTensor>& tensors;
  const nlohmann::json& meta;
};

struct CheckpointWriter {
  int rank = 0, num_ranks = 1;
  int64_t shard_bytes = CheckpointStore::kShardBytes;  // of one shard, or one tensor
  Stream* device = nullptr;                            // of tensors that are on a GPU
  std::byte* piece = nullptr;                          // and room for kPieceBytes of them on the host
};

// Writes the shards of this rank: its slices but replicas. Error{io} says which save it was.
CheckpointManifest write_share(const std::string& folder, const CheckpointContent& content,
                               const CheckpointWriter& writer);

// Makes a folder in which all shards are written the checkpoint of manifest.step. The one rename at its end replaces a
// checkpoint of the same step in one stroke.
void publish_checkpoint(const std::string& dir, const std::string& unfinished, const CheckpointManifest& manifest);

// The parts of it, for who makes a folder of its own: the name of the next shard; a written shard, its tensors whole,
// closed and entered in the manifest; the manifest, last.
std::string shard_name(const CheckpointManifest& manifest, const CheckpointWriter& writer = {});
void close_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 SafetensorsWriter& writer);
void write_manifest(const std::string& folder, const std::string& text);

}  // namespace moebius
