// Weights from a folder into a model: from a checkpoint of Moebius or a Hugging Face folder. The
// files in the folder tell which it is.
#pragma once

#include <optional>
#include <string>

#include "config/run_spec.h"
#include "model/model.h"
#include "weights/not_finite.h"

namespace moebius {

// The model of a folder: config.json of a Hugging Face folder, or the spec that a checkpoint
// carries. `path` may also be a run's folder or its checkpoints folder; then the newest complete
// checkpoint is taken. Error{input} naming what is missing.
ModelSpec read_model_spec(const std::string& path);

// The run that a checkpoint comes from: its tokenizer, sequence length and documents. Nothing for a
// Hugging Face folder or one that was imported.
std::optional<RunSpec> read_run_spec(const std::string& path);

// Fills every parameter (masters where the model has them) and state of the model, on the stream
// s of its device. f32, bf16, f16 and f64 on disk are converted to the dtype of the parameter. A
// rank of several reads what it holds; the folder must hold all of the model. Strict:
// Error{input} lists the tensors that are missing, unexpected or of another shape (the first 20
// and the counts). Optimizer state of a checkpoint is not read. Returns the tensors with elements
// that are not finite, to be warned of.
std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path);

// Checks that a folder's tensors are those of the model: the same Error{input}, before
// any memory is asked for by sizes that a config.json or a recipe may only claim.
// Multi-token prediction is passed over.
void check_weights(const std::string& path, const ModelSpec& model);

}  // namespace moebius
