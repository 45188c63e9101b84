// A copy of one life of a bound plan in pinned host memory, with the same layout.
#pragma once

#include "memory/plan.h"

namespace moebius {

class HostMirror {
 public:
  HostMirror() = default;
  HostMirror(const MemoryPlan& plan, Life life);  // pinned; REQUIRES a plan that is bound on a GPU

  Tensor at(Tensor t) const;        // returns the host copy of a tensor of this life
  void to_device(Stream& s) const;  // may return before the memory was read (copy_to_device)
  void to_host(Stream& s) const;    // returns when the memory is filled

 private:
  void* base_ = nullptr;  // the life's memory on the device
  HostBuffer memory_;
};

}  // namespace moebius
