#include "core/arena.h"

#include <algorithm>

namespace moebius {

Tensor StepStack::alloc(Shape shape, DType dtype) {
  Tensor t{.shape = shape, .dtype = dtype, .device = device_};
  const int64_t bytes = div_ceil(t.num_bytes(), kAlign) * kAlign;
  if (device_ != DeviceKind::null) {
    MOEBIUS_CHECK(internal, used_ + bytes <= capacity_,
                  "step stack: {} needs {} bytes, {} of {} planned are in use; this is a bug in the memory plan",
                  to_string(t), bytes, used_, capacity_);
    t.data = base_ + used_;
  }
  used_ += bytes;
  high_water_ = std::max(high_water_, used_);
  peak_ = std::max(peak_, used_);
  return t;
}

}  // namespace moebius
