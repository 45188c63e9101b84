// Rotary positions in a config.json: a table named rope_scaling (v4) or rope_parameters (v5), with
// rope_theta and original_max_position_embeddings inside or outside of it.
#pragma once

#include <string>
#include <vector>

#include "config/hf/reader.h"
#include "config/model_spec.h"

namespace moebius {

// Reads rope_theta and rope_scaling into m, which has its family's defaults and
// max_position_embeddings already. Two places that contradict each other are an error, though
// transformers prefers rope_scaling to rope_parameters, and a theta in the table.
void read_rope(const HfReader& r, ModelSpec& m);

// Returns the names of the entries of such a table that Moebius reads, for all types.
std::vector<std::string> rope_table_keys();

// Returns the value of rope_scaling in v4 spelling; null for plain frequencies. Entries that Moebius does
// not know are copied from the table in the model's source.
nlohmann::json rope_scaling_value(const ModelSpec& m);

}  // namespace moebius
