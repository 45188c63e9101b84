// Copies between host memory and a device that run beside the work of the device's stream. Each direction has a
// stream of its own, and a copy belongs to a slot: memory of the device that later copies use again.
//   cpu   a copy runs when it is waited for, the latest moment that a GPU may run it: a wait that is missing
//         changes numbers here too
//   cuda  copies are ordered by events between streams, and may be part of a CudaGraph; the host waits for none
//   null  nothing runs
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "device/device.h"

namespace moebius {

class SideCopies {
 public:
  static constexpr int kSlots = 2;
  struct Copy {
    void* device = nullptr;
    void* host = nullptr;  // pinned for a GPU (HostBuffer)
    int64_t num_bytes = 0;
  };

  // For the device of the stream. On a GPU it makes streams and events, so it is not called during a capture.
  static std::unique_ptr<SideCopies> make(const Stream& s);
  virtual ~SideCopies() = default;

  // Starts copies to the host. They begin after all work of s so far.
  virtual void to_host(Stream& s, int slot, std::span<const Copy> copies) = 0;
  // Starts copies to the device. They begin after all work of s so far, and after the slot's copies to the host.
  virtual void to_device(Stream& s, int slot, std::span<const Copy> copies) = 0;
  // Work of s from now on begins after the slot's copies to the host, or to the device, of this capture or run.
  virtual void wait_to_host(Stream& s, int slot) = 0;
  virtual void wait_to_device(Stream& s, int slot) = 0;
};

namespace cuda {
std::unique_ptr<SideCopies> make_side_copies(Accelerator& a);
}  // namespace cuda

}  // namespace moebius
