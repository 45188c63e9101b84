// The values of memory.recompute, memory.offload and memory.fit as text, and keys about memory with rules of their own.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "config/policy_spec.h"
#include "config/recipe/table.h"

namespace moebius {

// "norm", or "norm:0-3,7" for some layers. Each name is in the list once. Ranges of a name are in order, and do not
// overlap. Returns no value for an unknown or repeated name, or a range that is empty or overlaps.
std::optional<RecomputeSpec> parse_recompute(const std::vector<std::string>& texts);
// Returns the list that reads back as `recompute`, in the order of kRecomputeNames.
std::vector<std::string> recompute_texts(const RecomputeSpec& recompute);
// Returns the value as a recipe has it: ["norm", "layer:0-3"].
std::string recompute_list(const RecomputeSpec& recompute);
std::string offload_list(const OffloadSpec& offload, bool weights = false);  // weights: with RunSpec::offload_weights

// "80GiB", "79.5GiB", "640MB", "1024B". No value for other strings, and for bytes outside [1, 2^60].
std::optional<int64_t> parse_bytes(const std::string& text);
// Returns the shortest text that reads back as these bytes: "80GiB"; empty for 0.
std::string exact_bytes_text(int64_t bytes);

// "layer_input", or a name of memory.recompute, each at most once. No value for other strings.
std::optional<OffloadSpec> parse_offload(const std::vector<std::string>& texts);
// Returns the list that reads back as the names of `offload`: layer_input, then in the order of kRecomputeNames.
std::vector<std::string> offload_texts(const OffloadSpec& offload);

RecipeKey recompute_key();
RecipeKey offload_key();
RecipeKey offload_fraction_key();
RecipeKey fit_key();
RecipeKey expert_rows_key();
RecipeKey offload_buffer_key();

}  // namespace moebius
