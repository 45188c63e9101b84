// One save, from tensors in memory to a step folder that counts: the commit protocol.
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "train/checkpoint.h"

namespace moebius {

struct CheckpointContent {
  int64_t step = 0;
  const std::vector<NamedTensor>& tensors;
  const nlohmann::json& meta;
};

// Shards (each at most shard_bytes of tensors, or one tensor), manifest, folder: each on the device before the next
// begins. Then one rename, which replaces a checkpoint of the same step in one stroke. Error{io} leaves nothing behind.
// REQUIRES: the caller holds the folder's CheckpointLock.
void write_checkpoint(const std::string& dir, const CheckpointContent& content, int64_t shard_bytes);

}  // namespace moebius
