// The state of a run as global tensors, for checkpoints.
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/tensors.h"
#include "engine/engine.h"
#include "weights/fingerprint.h"

namespace moebius {

// Fingerprints of what a run reads and its checkpoints do not hold, and the choice that is made when it starts.
struct RunInputs {
  std::string data;                        // Loader::fingerprint of the training data
  std::string dispatcher;                  // DispatcherChoice::name
  std::optional<WeightsFingerprint> base;  // frozen weights of model.init_from; nothing: the run has no adapters
};

// Returns the elements that this rank owns of every part of every parameter (f32 masters) and of router
// state, under the part's global name, and of the optimizer's state, under the names that the
// optimizer gives it. After loading, ParamTable::sync() updates the owned weights, and then Engine::gather_weights()
// those of all ranks. With adapters the frozen model is left out: it is in the folder that it came from.
std::vector<NamedTensor> training_state(Engine& engine);

// Returns the other contents of a checkpoint: {"step", "model": config.json, "recipe": resolved TOML,
// "identity": the keys that change what is trained, "data": the fingerprint of the training data, "dispatcher": the
// name of the dispatcher, "base": the fingerprint of the weights that adapters belong to}.
nlohmann::json checkpoint_meta(const RunSpec& run, int64_t step, const RunInputs& inputs);

}  // namespace moebius
