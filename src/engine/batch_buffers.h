// The micro-batches of a step, in host memory and on the device.
//
// On the CPU both are the same memory. A GPU has either a copy of every micro-batch, filled by one upload, or one
// buffer that micro-batches use one after another. Then each micro-batch has host memory of its own, so that the host
// can fill one while earlier ones are copied and computed.
#pragma once

#include <deque>
#include <vector>

#include "engine/host_mirror.h"
#include "model/step.h"

namespace moebius {

class BatchBuffers {
 public:
  // Declares the micro-batches in the plan. share_buffer: the device has one buffer, which they share.
  BatchBuffers(MemoryPlan& plan, const BatchShape& shape, int64_t num_micro_batches, bool share_buffer);
  BatchBuffers(const BatchBuffers&) = delete;
  void bind(const MemoryPlan& plan, DeviceKind device);  // after plan.bind(); nothing is held on the null device

  MicroBatch& host(int64_t m) { return host_[static_cast<size_t>(m)]; }
  const MicroBatch& host(int64_t m) const { return host_[static_cast<size_t>(m)]; }
  // Returns micro-batch m in device memory, with the contents of its last upload().
  const MicroBatch& on_device(int64_t m);
  // Copies micro-batches [first, first + count) and their scalars to the device. If the
  // device has one buffer, count is 1.
  void upload(Stream& s, int64_t first, int64_t count);
  void set_lr_and_step(int64_t step, double lr);  // sets it for all micro-batches, before they are uploaded

  int64_t num_mirrors() const { return on_device_.size() == 1 ? num_ : 1; }  // buffers that a GPU copies from

 private:
  int64_t num_;
  std::deque<MicroBatch> on_device_, host_;
  std::vector<HostMirror> mirrors_;
};

}  // namespace moebius
