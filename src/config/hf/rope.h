// Rotary positions in a config.json: a table, rope_scaling (v4) or rope_parameters (v5), and rope_theta and
// original_max_position_embeddings in it or beside it.
#pragma once

#include "config/hf/reader.h"
#include "config/model_spec.h"

namespace moebius {

// rope_theta and rope_scaling of m, whose family's defaults and max_position_embeddings are there. What is said twice
// and differently is refused, though transformers prefers rope_scaling to rope_parameters and a theta in the table.
void read_rope(const HfReader& r, ModelSpec& m);

// The value of rope_scaling, v4 spelling; null for plain frequencies. Entries that Moebius does not know are taken from
// the table in the model's source.
nlohmann::json rope_scaling_value(const ModelSpec& m);

}  // namespace moebius
