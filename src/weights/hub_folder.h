// A model as a folder that transformers loads: what export and upcycle write.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/model_spec.h"
#include "weights/not_finite.h"
#include "weights/weights_source.h"

namespace moebius {

struct HubFolder {
  std::string out;  // folder to make
  const ModelSpec& model;
  const WeightsReader& weights;
  std::optional<DType> dtype;  // f32 or bf16 of all but the routers' correction biases; nothing: as it is stored
  std::string files;           // folder whose other files go along (tokenizer, ...); empty: none
  int64_t shard_bytes = 5'000'000'000;
};

struct HubFolderResult {
  int64_t num_tensors = 0, num_shards = 0, bytes = 0;  // bytes of tensors
  int64_t num_files = 0;                               // copied beside the weights and config.json
  std::vector<NotFinite> not_finite;                   // to be warned of
  std::vector<std::string> notices;                    // for the user; some may be empty
};

// config.json in the v4 spelling with every key that Moebius does not know (but quantization_config: weights that were
// packed are not), weights under the hub's names, the other files unchanged. Experts have a tensor each for a
// projection, but one for all in families whose checkpoints know no other (hub/fused_experts.h). The folder appears
// whole or not at all. Memory: the largest tensor twice, of fused ones an expert's. Error{input} for a model_type that
// transformers does not have.
HubFolderResult write_hub_folder(const HubFolder& hub);

// The folder of the other files that came with a model; empty when none did.
std::string other_files_of(const WeightsFolder& from);

}  // namespace moebius
