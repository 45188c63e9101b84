// Keys of the model that a recipe may give together with model.hf: those that extend the context of a
// trained model. They replace the values in its config.json.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace moebius {

// Returns whether the key is max_position_embeddings, rope_theta or rope_scaling.
bool extends_context(const std::string& hf_key);

// Returns config with the values of `changes`, an object of such keys. The theta of the old
// config, in either spelling, stays unless it is changed. If a table of "yarn" or "llama3" lacks the
// number of positions that the model was trained on, the old config gives it: its
// original_max_position_embeddings, or else its max_position_embeddings.
nlohmann::json with_longer_context(nlohmann::json config, const nlohmann::json& changes);

}  // namespace moebius
