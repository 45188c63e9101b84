// Weights from a folder into a model: from a checkpoint of Moebius or a Hugging Face folder. The
// files in the folder show which it is.
#pragma once

#include <optional>
#include <string>

#include "config/run_spec.h"
#include "model/model.h"
#include "weights/not_finite.h"
#include "weights/source.h"

namespace moebius {

// Returns the model of a folder: the config.json of a Hugging Face folder, or the spec in a checkpoint. path may also
// be a run's folder or its checkpoints folder; then the newest complete checkpoint is used. Throws Error{input} with
// what is missing.
ModelSpec read_model_spec(const std::string& path);

// Returns the run that a checkpoint comes from, with its tokenizer, sequence length and documents. Returns nothing for
// a Hugging Face folder, and for an imported one.
std::optional<RunSpec> read_run_spec(const std::string& path);

// Fills every parameter (its master, if it has one) and the state of the model, on the stream s of its device. f32,
// bf16, f16 and f64 on disk are converted to the dtype of the parameter. Each rank reads its own shards; the folder
// must have the whole model. Throws Error{input} that lists tensors that are missing, unexpected or of another shape
// (the first 20 and the counts). The optimizer state of a checkpoint is not read. Returns the tensors with non-finite
// elements, for a warning.
// An adapter is added to the weights first, each rank to its shards.
std::vector<NotFinite> load_weights(Stream& s, Model& model, const std::string& path, const AddedAdapter& adapter = {});

// Checks that a folder's tensors are those of the model, and an adapter one of it. Throws the same Error{input} as
// load_weights(), before memory is allocated, since the sizes in a config.json or a recipe may be wrong.
// Tensors of multi-token prediction are ignored.
void check_weights(const std::string& path, const ModelSpec& model, const AddedAdapter& adapter = {});

}  // namespace moebius
