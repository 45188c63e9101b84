// A warning of products that the recipe makes slower than bf16, by the figures that come with the program.
#pragma once

#include <optional>

#include "config/run_spec.h"
#include "train/start_notes.h"

namespace moebius {

// None where no product loses, where none like the model's was timed (precision/measured_products.h), without a
// recipe, on a CPU, and with tp or etp above 1, whose shapes were not timed.
std::optional<StartNote> precision_note(const RunSpec& run);

}  // namespace moebius
