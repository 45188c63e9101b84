#include "ops/elementwise/add_row.h"
#include "ops/backends.h"

namespace moebius::cpu {

void add_row(Stream& s, Tensor y_SD, Tensor row_1D) {
  const int64_t D = row_1D.dim(1);
  const float* row = row_1D.ptr<float>();
  float* y = y_SD.ptr<float>();
  parallel_rows(s.pool(), y_SD.dim(0), 256, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      for (int64_t d = 0; d < D; ++d) y[i * D + d] += row[d];
    }
  });
}

}  // namespace moebius::cpu
