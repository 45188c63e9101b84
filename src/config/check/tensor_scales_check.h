// Checks of layouts whose ranks share tensors that have one scale (docs/design/quantised-products.md).
#pragma once

#include "config/run_spec.h"

namespace moebius {

// Throws Error{usage} where precision.recipe has scales of whole tensors and ranks of this layout cannot share them.
void check_tensor_scales(const RunSpec& run);

}  // namespace moebius
