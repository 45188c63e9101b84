// A model in: a checkpoint from a Hugging Face folder, that training starts from and export takes back out.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "weights/not_finite.h"

namespace moebius {

// In a checkpoint: the key of its meta data that says it was imported, and the folder of the files that came along.
inline constexpr const char* kImportedKey = "imported";
inline constexpr const char* kImportedFiles = "files";

struct ImportSpec {
  std::string out;    // checkpoint folder to make
  std::string model;  // Hugging Face folder
  int64_t shard_bytes = 5'000'000'000;
};

struct ImportResult {
  int64_t num_tensors = 0, num_shards = 0, bytes = 0;  // bytes of tensors
  int64_t num_files = 0;                               // copied along
  std::vector<NotFinite> not_finite;                   // to be warned of
  std::vector<std::string> notices;                    // for the user; some may be empty
};

// Every tensor under its canonical name in the dtype it has (f32 for those in few bits with scales), fused experts
// taken apart; config.json as it lies in the meta data; all other files beside. The checkpoint appears whole or not at
// all. Memory: the largest tensor. Error{input} as load_weights.
ImportResult import_hugging_face(const ImportSpec& spec);

}  // namespace moebius
