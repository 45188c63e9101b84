// Weights from elsewhere: a checkpoint of Moebius or a Hugging Face folder, told apart by what lies in the folder.
#pragma once

#include <optional>
#include <string>

#include "config/run_spec.h"
#include "model/model.h"
#include "weights/not_finite.h"

namespace moebius {

class Engine;

// The model of a folder: config.json of a Hugging Face folder, or the spec that a
// checkpoint carries. `path` may also be a run's folder or its checkpoints folder:
// the newest complete checkpoint is taken. Error{input} naming what is missing.
ModelSpec read_model_spec(const std::string& path);

// The run that a checkpoint comes from: its tokenizer, sequence length and documents. Nothing for a Hugging Face folder
// or one that was imported.
std::optional<RunSpec> read_run_spec(const std::string& path);

// Fills every parameter (masters where the model has them) and state of the model; bf16, f16, f32 and f64 on disk
// become what the parameter wants. Strict: Error{input} lists what is missing, unexpected or of another shape (the
// first 20 and the counts). Optimizer state of a checkpoint is not read. Returns the tensors with elements that are not
// finite, to be warned of.
std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path);
// The same for one rank of several: it reads what it holds, and the folder must hold all of the model.
std::vector<NotFinite> load_weights(Engine& engine, const std::string& path);

// Whether a folder's tensors are those of the model: the same Error{input} before any memory is asked for by sizes that
// a config.json or a recipe may only claim. Multi-token prediction is passed over.
void check_weights(const std::string& path, const ModelSpec& model);

}  // namespace moebius
