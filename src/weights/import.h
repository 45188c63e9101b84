// Makes a checkpoint from a Hugging Face folder: training starts from it, and export writes it as
// such a folder again.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/stopped.h"
#include "weights/not_finite.h"
#include "weights/source.h"

namespace moebius {

// In a checkpoint: the key of its meta data that marks it as imported, and the folder of
// the other files.
inline constexpr const char* kImportedKey = "imported";
inline constexpr const char* kImportedFiles = "files";

struct ImportSpec {
  std::string out;    // checkpoint folder to make
  std::string model;  // Hugging Face folder
  AddedAdapter adapter = {};
  int64_t shard_bytes = 5'000'000'000;
  ShouldStop should_stop = {};  // asked before each tensor and each other file
};

struct ImportResult {
  int64_t num_tensors = 0, num_shards = 0, bytes = 0;  // bytes of tensors
  int64_t num_files = 0;                               // other files that were copied
  std::vector<NotFinite> not_finite;                   // tensors that the user is warned of
  std::vector<std::string> notices;                    // messages for the user; some may be empty
};

// Stores every tensor under its canonical name and in its own dtype (quantised tensors, and matrices to which an
// adapter is added, in f32), with fused experts split. The scales of 8-bit floats are stored too, so that an export can
// restore the original bits. config.json becomes part of the meta data; all other files are copied. The checkpoint
// appears whole or not at all. Memory: the largest tensor. Throws the errors of load_weights().
ImportResult import_hugging_face(const ImportSpec& spec);

}  // namespace moebius
