// Writes a model as a folder that transformers loads: for export and upcycle.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "core/stopped.h"
#include "weights/not_finite.h"
#include "weights/source.h"

namespace moebius {

struct HubFolder {
  std::string out;  // folder to make
  const ModelSpec& model;
  const WeightsReader& weights;
  std::optional<DType> dtype;  // f32 or bf16, for all but the routers' correction biases; nothing: as it is stored
  bool block_fp8 = false;      // matrices of quantised products in 8-bit floats with block scales (weights/block_fp8.h)
  std::string files;           // folder whose other files are copied (tokenizer, ...); empty: none
  int64_t shard_bytes = 5'000'000'000;
  ShouldStop should_stop = {};  // asked before each tensor and each other file
};

struct HubFolderResult {
  int64_t num_tensors = 0, num_shards = 0, bytes = 0;  // bytes of tensors
  int64_t num_files = 0;                               // other files that were copied
  std::vector<NotFinite> not_finite;                   // tensors that the user is warned of
  std::vector<std::string> notices;                    // messages for the user; some may be empty
};

// Writes config.json with the keys of transformers 4, weights under the names of Hugging Face, and the other files
// unchanged. Unknown keys of config.json are kept. quantization_config is kept only if weights are written as 8-bit
// floats: those that were released in this form, or else those whose products the recipe quantises. Each expert has a
// tensor per projection, except in families whose checkpoints fuse experts (hub/fused_experts.h). The folder appears
// whole or not at all. Memory: twice the largest tensor, or twice an expert of a fused tensor. Throws Error{input} for
// a model_type that transformers does not have.
HubFolderResult write_hub_folder(const HubFolder& hub);

// Returns the folder of the other files that came with a model; empty when none did.
std::string other_files_of(const WeightsFolder& from);

}  // namespace moebius
