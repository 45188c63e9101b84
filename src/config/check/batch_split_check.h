// Checks of the needs of parallel.expert_overlap = "batch_split". A recipe is checked before there is an engine, the
// engine checks its GPU, and each layer its own products. All of them give the same message.
#pragma once

#include <string>

#include "config/run_spec.h"

namespace moebius {

// Returns whether Hopper's kernels, which compute a part of the rows in bf16, take these columns: multiples of 8.
bool takes_split_widths(const ModelSpec& model, int64_t etp);

// Each of these throws Error{usage} unless its condition holds. origin: the end of the message, where the key was set.
// are_plain: rows and products are not quantised, and experts have no adapters.
void check_split_rows(bool are_plain, const std::string& origin = "");
// is_direct: the direct dispatcher sends the rows.
void check_split_dispatcher(bool is_direct, const std::string& origin = "");
// exist: the rank's kernels can compute a part of the rows. got: the actual setting, "run.kernels = \"portable\"".
void check_split_kernels(bool exist, const std::string& got, const std::string& origin = "");

// Returns a sentence about the GPU that a run with batch_split needs. Empty for a run that needs none.
std::string split_kernels_note(const RunSpec& run);

// Throws the errors above where the values of the recipe decide them. What precision.keep and lora.targets match, and
// the dispatcher that "auto" becomes, are known when the layers are made, as `config` and `plan` also do.
void check_batch_split(const RunSpec& run);

}  // namespace moebius
