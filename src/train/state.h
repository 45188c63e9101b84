// The state of a run as global tensors, for checkpoints.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "checkpoint/tensors.h"
#include "engine/engine.h"

namespace moebius {

// Returns the elements that this rank owns of every part of every parameter (f32 masters) and of router
// state, under the part's global name, and of the optimizer's state, under the names that the
// optimizer gives it. After loading, ParamTable::sync() updates the owned weights, and then Engine::gather_weights() those
// of all ranks. With adapters the frozen model is left out: it is in the folder that it came from.
std::vector<NamedTensor> training_state(Engine& engine);

// Returns the other contents of a checkpoint: {"step", "model": config.json, "recipe": resolved TOML,
// "identity": the keys that change what is trained, "data": the fingerprint of the training data}.
nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const std::string& data);

}  // namespace moebius
