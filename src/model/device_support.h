// The check that a device has kernels for a model.
#pragma once

#include "config/model_spec.h"
#include "device/device.h"

namespace moebius {

struct DeviceUse {
  int64_t batch = 1;  // sequences that a rank computes at once
  int64_t tp = 1;     // ranks that share the heads
};

// Throws Error{usage} with the key of the recipe, the values that the kernels support, the value that was given, and
// what to do. So a run is refused before it uses a GPU or memory. For the null device, pass its target.
void check_device(const ModelSpec& model, DeviceKind device, const DeviceUse& use = {});

}  // namespace moebius
