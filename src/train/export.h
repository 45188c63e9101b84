// A model out: a folder that transformers loads, from a checkpoint or from another Hugging Face folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/dtype.h"

namespace moebius {

struct ExportSpec {
  std::string out;    // folder to make
  std::string model;  // as in train/weights.h
  // f32 or bf16, rounded to nearest even, of all but the routers' correction biases; nothing: each tensor as it is
  // stored.
  std::optional<DType> dtype;
  std::string files;  // folder whose other files go along (tokenizer, ...); empty: those that came with the model
  int64_t shard_bytes = 5'000'000'000;
};

struct ExportResult {
  int64_t num_tensors = 0, num_shards = 0, bytes = 0;  // bytes of tensors
  int64_t num_files = 0;                               // copied beside the weights and config.json
};

// config.json in the v4 spelling with every key that Moebius does not know (but quantization_config: weights that were
// packed are not), weights under the hub's names (one tensor
// per expert and projection), the other files unchanged. The folder appears whole or not at all. Memory: the largest
// tensor twice. Error{input} as load_weights, and for a model_type that transformers does not have.
ExportResult export_hugging_face(const ExportSpec& spec);

}  // namespace moebius
