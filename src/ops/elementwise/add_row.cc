#include "ops/elementwise/add_row.h"

namespace moebius {

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  check_tensor("add_row", "row", row_1D, DType::f32, {1, y_SD.shape.rank() == 2 ? y_SD.dim(1) : 0});
  check_tensor("add_row", "y", y_SD, DType::f32, {y_SD.dim(0), y_SD.dim(1)});
  OpScope scope(s, "add_row", {.flops = static_cast<double>(y_SD.numel()), .bytes = 8.0 * y_SD.numel()});
  MOEBIUS_CHECK(usage, s.device() != DeviceKind::cuda, "add_row: this build has no CUDA backend");
  if (s.device() == DeviceKind::null) return;
  const int64_t D = row_1D.dim(1);
  const float* row = row_1D.ptr<float>();
  float* y = y_SD.ptr<float>();
  parallel_rows(s.pool(), y_SD.dim(0), 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = 0; d < D; ++d) y[i * D + d] += row[d];
    }
  });
}

}  // namespace moebius
