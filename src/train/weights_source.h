// The two kinds of folder that weights come from; weights.h tells them apart.
#pragma once

#include <string>

#include "model/model.h"

namespace moebius {

struct WeightsFolder {
  enum class Kind { hugging_face, checkpoint };
  Kind kind = Kind::hugging_face;
  std::string path;  // the folder itself: a newest checkpoint is resolved
};

// Error{input} naming what was looked for.
WeightsFolder find_weights(const std::string& path);

// Reads a Hugging Face folder. bf16, f16, f32 and f64 on disk become what the parameter wants.
void load_hugging_face(Stream& s, Model& model, const std::string& folder);
// Reads a checkpoint's weights (masters) and state, every byte against its hash.
void load_checkpoint_weights(Stream& s, Model& model, const std::string& folder);

// to = from, n elements in host memory, rounded to nearest even where it narrows. to: f32 or bf16, on the stream's
// device; from: f32, bf16, f16 or f64, anything else is Error{input} naming `who`.
void convert_elements(Stream& s, const Tensor& to, const void* from, DType from_dtype, const std::string& who);

// What training keeps for itself and a model does without: it starts even where nothing was saved.
bool is_training_state(const std::string& name);

}  // namespace moebius
