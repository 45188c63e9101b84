// manifest.json of a checkpoint: its tensors and their places in its files, with its own hash
// at the end.
//
//   {"format": "moebius-checkpoint", "version": 2, "step": 100, "world": {"ranks": 8}, "meta": {...},
//    "files": {NAME: {"bytes", "header_bytes", "header_xxh3"}},
//    "tensors": {NAME: {"dtype", "shape",
//                       "pieces": [{"file", "offset", "bytes", "block", "range", "xxh3"}]}},
//    "manifest_xxh3": HASH}
// A piece without "block" [dim, begin, count] has the whole tensor as its block; a piece without "range" [begin, end]
// is all of its block. HASH covers all bytes before its key. The hashes of a file's header and of its pieces cover the
// whole file. Version 1 is for one rank: it has one piece per tensor, with its fields next to "dtype". It can be read,
// but is no longer written.
#pragma once

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "checkpoint/tensors.h"

namespace moebius {

inline constexpr const char* kManifestName = "manifest.json";

struct CheckpointFile {
  int64_t bytes = 0;
  int64_t header_bytes = 0;  // bytes before the first tensor
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

// Throws Error{input} that names `who` unless `text` is complete and of a known version, and every piece is inside a
// file of the manifest.
CheckpointManifest parse_manifest(std::string_view text, const std::string& who);

// Throws Error{input} that names `who` unless the pieces of every tensor have each of its elements once.
void check_complete(const CheckpointManifest& manifest, const std::string& who);

// Merges the manifests of all ranks into one; step, meta and the number of ranks are those of the first. A piece that
// several ranks wrote is listed once. Throws Error{distributed} if they wrote different bytes, or disagree
// about a tensor.
CheckpointManifest merge_manifests(std::vector<CheckpointManifest> parts);

}  // namespace moebius
