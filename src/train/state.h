// The state of a run as global tensors: what a checkpoint holds.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <vector>

#include "checkpoint/checkpoint.h"
#include "engine/engine.h"

namespace moebius {

// Of every part of every parameter and of router state what this rank owns, under its
// global name (f32 masters), its Adam moments as adam_m.NAME and adam_v.NAME. Once it
// is loaded the weights follow: ParamTable::sync(), then Optimizer::gather().
std::vector<NamedTensor> training_state(Engine& engine);

// What else a checkpoint carries: {"step", "model": config.json, "recipe": resolved TOML, "identity": the keys that
// change what is trained, "data": the fingerprint of the training data}.
nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const std::string& data);

}  // namespace moebius
