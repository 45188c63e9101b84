// Writes a folder that transformers loads, from a checkpoint or from another Hugging Face folder.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "core/dtype.h"
#include "core/stopped.h"
#include "weights/hub_folder.h"

namespace moebius {

struct ExportSpec {
  std::string out;    // folder to make
  std::string model;  // path of the model, as in weights/load.h
  // f32 or bf16, rounded to nearest even, for all but the routers' correction biases. Nothing: an
  // imported model keeps the dtype of each tensor, and a run is written in f32, the dtype of its
  // masters, which represents frozen weights exactly.
  std::optional<DType> dtype;
  // Matrices of quantised products in 8-bit floats with block scales, as DeepSeek releases them
  // (weights/block_fp8.h). A matrix that was released in this form gets its original bits. In an exported run all other
  // tensors are bf16.
  bool block_fp8 = false;
  std::string files;  // folder whose other files are copied (tokenizer, ...); empty: those that came with the model
  int64_t shard_bytes = 5'000'000'000;
  ShouldStop should_stop = {};  // asked before each tensor and each other file
};

using ExportResult = HubFolderResult;

// Writes a folder as in weights/hub_folder.h. Throws Error{input} as load_weights, and for a model_type
// that transformers does not have.
ExportResult export_hugging_face(const ExportSpec& spec);

}  // namespace moebius
