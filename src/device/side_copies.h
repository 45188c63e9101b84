// Asynchronous copies between host memory and a device, which overlap with the work of the device's stream. Each
// direction has a stream of its own. A copy belongs to a slot: device memory that later copies reuse.
//   cpu   A copy runs when it is waited for, the latest time at which a GPU might run it. So a missing wait changes
//         numbers on the CPU too.
//   cuda  Events between streams order the copies. They may be captured in a CudaGraph, and the host never waits.
//   null  Nothing runs.
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

  // Returns the copies of the stream's device. On a GPU this creates streams and events.
  // REQUIRES: no CUDA graph is being captured.
  static std::unique_ptr<SideCopies> make(const Stream& s);
  virtual ~SideCopies() = default;

  // Starts copies to the host. They wait for all work of s so far.
  virtual void to_host(Stream& s, int slot, std::span<const Copy> copies) = 0;
  // Starts copies to the device. They wait for all work of s so far, and for the slot's copies to the host.
  virtual void to_device(Stream& s, int slot, std::span<const Copy> copies) = 0;
  // Makes work of s from now on wait for the slot's last copies to the host, or to the device.
  virtual void wait_to_host(Stream& s, int slot) = 0;
  virtual void wait_to_device(Stream& s, int slot) = 0;
};

namespace cuda {
std::unique_ptr<SideCopies> make_side_copies(Accelerator& a);
}  // namespace cuda

}  // namespace moebius
