// For the tests of this folder: a config.json as JSON, and the model that it gives.
#pragma once

#include <nlohmann/json.hpp>

#include "config/model_spec.h"

namespace moebius {

inline ModelSpec from(const nlohmann::json& config) { return model_spec_from_hf(config, "DIR/config.json"); }

// Returns a dense model of four layers; it has shapes of experts, and no experts.
inline nlohmann::json moebius_config() {
  return {{"model_type", "moebius"},    {"vocab_size", 11},
          {"hidden_size", 12},          {"num_hidden_layers", 4},
          {"num_attention_heads", 2},   {"intermediate_size", 20},
          {"moe_intermediate_size", 6}, {"max_position_embeddings", 33}};
}

// config with the keys of `more` added or replaced.
inline nlohmann::json with(nlohmann::json config, const nlohmann::json& more) {
  config.update(more);
  return config;
}

}  // namespace moebius
