// Keys of the model that a recipe may give beside model.hf: those that extend the context of a trained
// model. They take the place of what its config.json says.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace moebius {

// Returns whether the key is max_position_embeddings, rope_theta or rope_scaling.
bool extends_context(const std::string& hf_key);

// Returns config with the values of `changes`, an object of such keys. A theta in either spelling of
// the old table holds unless it is changed. A table of "yarn" or "llama3" that does not say on how many
// positions the model was trained gets what the old config says: its
// original_max_position_embeddings, or else its max_position_embeddings.
nlohmann::json with_longer_context(nlohmann::json config, const nlohmann::json& changes);

}  // namespace moebius
