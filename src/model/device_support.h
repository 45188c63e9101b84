// Which models the kernels of a device do not take.
#pragma once

#include "config/model_spec.h"
#include "device/device.h"

namespace moebius {

struct DeviceUse {
  int64_t batch = 1;  // sequences that a rank computes at once
  int64_t tp = 1;     // ranks that share the heads
};

// Error{usage} naming the key of the recipe, what the kernels take, what came and what to do, so that a run is refused
// before it takes a GPU or memory. A null device has no limits of its own: ask for the one it stands for.
void check_device(const ModelSpec& model, DeviceKind device, const DeviceUse& use = {});

}  // namespace moebius
