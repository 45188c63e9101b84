// One save, from tensors in memory to a step folder that counts: the commit protocol.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "io/safetensors.h"
#include "train/checkpoint.h"

namespace moebius {

struct CheckpointManifest;

struct CheckpointContent {
  int64_t step = 0;
  const std::vector<NamedTensor>& tensors;
  const nlohmann::json& meta;
};

// Shards (each at most shard_bytes of tensors, or one tensor), manifest, folder: each on the device before the next
// begins. Then one rename, which replaces a checkpoint of the same step in one stroke. Error{io} leaves nothing behind.
// REQUIRES: the caller holds the folder's CheckpointLock.
void write_checkpoint(const std::string& dir, const CheckpointContent& content, int64_t shard_bytes);

// The parts of it, for who makes a folder of its own: the name of the next shard; a written shard closed and entered in
// the manifest; the manifest, last.
std::string shard_name(const CheckpointManifest& manifest);
void close_shard(CheckpointManifest& manifest, const std::string& folder, const std::string& name,
                 SafetensorsWriter& writer);
void write_manifest(const std::string& folder, const std::string& text);

}  // namespace moebius
