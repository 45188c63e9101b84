// The checks of a run, for callers that check many runs of one model.
#pragma once

#include <cstdint>

#include "config/run_spec.h"

namespace moebius {

// Does the checks of RunSpec::check() in another order, without ModelSpec::check(). REQUIRES: that has passed.
void check_except_model(const RunSpec& run, int64_t world_size);

// The two parts of check_except_model(). check_policies() checks each value, and most relations that no layout changes.
// check_layout_of() checks the rest, with all that may fail if the keys change that a search of layouts chooses
// ([parallel], [memory], train.micro_batch, moe.rank_rows_factor, precision.recipe, optimizer.offload).
void check_policies(const RunSpec& run);
void check_layout_of(const RunSpec& run, int64_t world_size);

}  // namespace moebius
