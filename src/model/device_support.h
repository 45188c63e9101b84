// Which parts of a model have no kernels for a GPU yet.
#pragma once

#include "config/model_spec.h"
#include "core/device.h"

namespace moebius {

// Error{usage} naming the part, so that a run is refused before it starts.
void check_device(const ModelSpec& model, DeviceKind device);

}  // namespace moebius
