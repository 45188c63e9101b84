// The check that the kernels of a device can compute a model.
#pragma once

#include "config/model_spec.h"
#include "device/device.h"

namespace moebius {

struct DeviceUse {
  int64_t batch = 1;  // sequences that a rank computes at once
  int64_t tp = 1;     // ranks that share the heads
};

// Error{usage} naming the key of the recipe, the values that the kernels support, the value that
// was given, and what to do. A run is thus refused before it uses a GPU or memory. A null device
// has no limits of its own: pass the device that it counts for.
void check_device(const ModelSpec& model, DeviceKind device, const DeviceUse& use = {});

}  // namespace moebius
