// The last line of an op: its arguments have been checked, and there is work to do.
#pragma once

#include <type_traits>

#include "device/device.h"

namespace moebius {

// Calls the backend of the stream's device: on_cpu(s, args...) or on_cuda(s, args...). The null device runs nothing.
template <class... Args>
void run_on_device(Stream& s, void (*on_cpu)(Stream&, Args...), void (*on_cuda)(Stream&, Args...),
                   const std::type_identity_t<Args>&... args) {
  switch (s.device()) {
    case DeviceKind::cpu:
      return on_cpu(s, args...);
    case DeviceKind::cuda:
      return on_cuda(s, args...);
    case DeviceKind::null:
      return;
  }
}

}  // namespace moebius
