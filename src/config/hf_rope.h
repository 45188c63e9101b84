// Rotary positions in a config.json: rope_theta and rope_scaling (v4), or rope_parameters (v5) with both.
#pragma once

#include "config/hf_reader.h"
#include "config/model_spec.h"

namespace moebius {

// rope_theta and rope_scaling of m, whose family's defaults and max_position_embeddings are there.
void read_rope(const HfReader& r, ModelSpec& m);

// The value of rope_scaling, v4 spelling; null for plain frequencies. Entries that Moebius does not know are taken from
// the table in the model's source.
nlohmann::json rope_scaling_value(const ModelSpec& m);

}  // namespace moebius
