// manifest.json of a checkpoint: what it holds and where, with its own hash at the end.
//
//   {"format": "moebius-checkpoint", "version": 1, "step": 100, "world": {"ranks": 1}, "meta": {...},
//    "files": {NAME: {"bytes", "header_bytes", "header_xxh3"}},
//    "tensors": {NAME: {"file", "offset", "bytes", "dtype", "shape", "xxh3"}}, "manifest_xxh3": HASH}
// HASH is of all the bytes before its key. The hash of a file's header and those of the tensors cover the whole file.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "train/checkpoint.h"

namespace moebius {

inline constexpr const char* kManifestName = "manifest.json";

struct CheckpointFile {
  int64_t bytes = 0;
  int64_t header_bytes = 0;  // what stands before the first tensor
  std::string header_xxh3;
};

struct CheckpointManifest {
  int64_t step = 0;
  int64_t num_ranks = 1;
  nlohmann::json meta;
  std::map<std::string, CheckpointFile> files;
  std::map<std::string, CheckpointTensor> tensors;
};

std::string to_text(const CheckpointManifest& manifest);

// Error{input} naming `who` unless `text` is whole, of this version, and every tensor lies inside a file of the
// manifest.
CheckpointManifest parse_manifest(std::string_view text, const std::string& who);

}  // namespace moebius
