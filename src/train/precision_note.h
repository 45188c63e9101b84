// A warning of products that the recipe makes slower than bf16, by measured times (precision/measured_products.h).
#pragma once

#include <optional>

#include "config/run_spec.h"
#include "precision/measured_products.h"
#include "train/start_notes.h"

namespace moebius {

// Returns nothing if no product is slower, if no product of a similar shape is among `measured`, without a recipe, on
// a CPU, where the recipe is emulated (precision.has_f8_kernels), and with tp or etp above 1, whose shapes were not
// measured. An untimed pass counts as no slower than in bf16.
std::optional<StartNote> precision_note(const RunSpec& run, std::span<const MeasuredProduct> measured);
std::optional<StartNote> precision_note(const RunSpec& run);  // measured: those of the run's recipe

}  // namespace moebius
