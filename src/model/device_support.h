// Which models a GPU has no kernels for.
#pragma once

#include "config/model_spec.h"
#include "core/device.h"

namespace moebius {

// Error{usage} naming what there is none for, so that a run is refused before it starts.
void check_device(const ModelSpec& model, DeviceKind device);

}  // namespace moebius
