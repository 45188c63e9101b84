// Turns a dense model into a Mixture of Experts: the MLP of every layer becomes experts
// that are copies of it, or slices of copies, and a router of random rows chooses among
// them (Megatron's rule).
//
//   granularity G, copies X = E / G; expert j is slice j mod G of the MLP, its intermediate_size cut in G: rows of gate
//   and up, columns of down, all three times G^(1/3), as each of the G slices of a copy gets 1/G of the copy's weight.
//   The router's row of expert j is row j / G of X random ones: the slices of one copy are chosen together.
//
// The chosen experts' weights sum to 1 (norm_topk_prob), so that with G = 1 the model computes the same function as the
// dense one. With G > 1 it only comes close, since silu(c x) is not c silu(x).
#pragma once

#include <cstdint>
#include <string>

#include "config/model_spec.h"
#include "core/stopped.h"
#include "weights/hub_folder.h"

namespace moebius {

struct UpcycleSpec {
  std::string out;    // Hugging Face folder to make
  std::string model;  // path of a dense model, as in weights/load.h
  int64_t num_experts = 0, top_k = 0;
  int64_t granularity = 1;
  uint64_t seed = 0;  // seed of the routers' rows
  int64_t shard_bytes = 5'000'000'000;
  ShouldStop should_stop = {};  // asked before each tensor and each other file
};

// Returns the spec of the upcycled model: llama and mistral become mixtral, qwen2 becomes qwen2_moe, qwen3
// becomes qwen3_moe. A qwen2_moe must have a shared expert: it is as wide as the others, and its
// down projection starts at zero. Throws Error{input} for a model that has experts already, and for one
// with a feature that its family of experts has no key for (windows of some layers in a qwen3,
// biases of attention in a llama). Throws Error{usage} for counts that do not divide.
ModelSpec upcycled_model(const ModelSpec& dense, const UpcycleSpec& spec);

struct UpcycleResult {
  HubFolderResult folder;
  ModelSpec model;
};

// Copies all other tensors, keys of config.json and files unchanged. Memory: the MLP of one layer
// and one tensor. Throws Error{input} as load_weights.
UpcycleResult upcycle(const UpcycleSpec& spec);

}  // namespace moebius
