// The state of a run as global tensors: what a checkpoint holds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace moebius {

// The elements that this rank owns of every part of every parameter and of router state, under its global name (f32
// masters), and their Adam moments as adam_m.NAME and adam_v.NAME. After loading it call ParamTable::sync(), then
// Optimizer::gather(), so that the weights follow.
std::vector<NamedTensor> training_state(Engine& engine);

// The other contents of a checkpoint: {"step", "model": config.json, "recipe": resolved TOML, "identity": the keys that
// change what is trained, "data": the fingerprint of the training data}.
nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const std::string& data);

}  // namespace moebius
