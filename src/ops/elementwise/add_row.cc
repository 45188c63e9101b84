#include "ops/elementwise/add_row.h"

#include "ops/backends.h"

namespace moebius {

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  check_tensor("add_row", "row", row_1D, DType::f32, {1, y_SD.shape.rank() == 2 ? y_SD.dim(1) : 0});
  check_tensor("add_row", "y", y_SD, DType::f32, {y_SD.dim(0), y_SD.dim(1)});
  OpScope scope(s, "add_row", {.flops = static_cast<double>(y_SD.numel()), .bytes = 8.0 * y_SD.numel()});
  if (y_SD.empty()) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::add_row(s, y_SD, row_1D);
    case DeviceKind::cuda:
      return cuda::add_row(s, y_SD, row_1D);
    case DeviceKind::null:
      return;
  }
}

}  // namespace moebius
