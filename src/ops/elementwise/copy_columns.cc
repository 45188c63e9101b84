#include "ops/elementwise/copy_columns.h"

namespace moebius {
namespace {

void check_columns(const char* name, const Tensor& x, int64_t first, int64_t count) {
  MOEBIUS_CHECK(usage, x.shape.rank() == 2 && first >= 0 && count >= 0 && first + count <= x.dim(1),
                "copy_columns: {} must be a matrix with columns [{}, {}); got {}", name, first, first + count,
                to_string(x));
}

}  // namespace

void copy_columns(Stream& s, const CopyColumns& a) {
  check_columns("to", a.to_TA, a.to_first, a.count);
  check_columns("from", a.from_TB, a.from_first, a.count);
  check_tensor("copy_columns", "to", a.to_TA, a.from_TB.dtype, {a.from_TB.dim(0), a.to_TA.dim(1)});
  const int64_t num_bytes = a.to_TA.dim(0) * a.count * size_of(a.to_TA.dtype);
  OpScope scope(s, "copy_columns", {0, 2.0 * static_cast<double>(num_bytes)});
  if (num_bytes == 0) return;
  switch (s.device()) {
    case DeviceKind::cpu:
      return cpu::copy_columns(s, a);
    case DeviceKind::cuda:
      return cuda::copy_columns(s, a);
    case DeviceKind::null:
      return;
  }
}

}  // namespace moebius
