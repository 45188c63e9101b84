// A point in the work of a GPU's stream that the host can wait for, while later work of the stream continues.
#pragma once

#include <memory>

#include "device/accelerator.h"

namespace moebius {

class GpuMark {
 public:
  void set(Accelerator& accelerator);  // marks the end of all work launched so far; a later call moves the mark
  void wait() const;                   // REQUIRES set(). Throws Error{internal} when work of the GPU failed

 private:
  std::shared_ptr<void> event_;
};

}  // namespace moebius
