#include "memory/alignment.h"

#include "memory/plan.h"

namespace moebius {

// Quantised elements have the alignment of f32, beside which they are planned, so that the total does not depend on the
// order of tensors.
int64_t align_bytes(DType dtype) {
  switch (dtype) {
    case DType::f8_e4m3:
    case DType::f8_e5m2:
    case DType::f4_e2m1:
    case DType::e8m0:
      return MemoryPlan::kAlign * size_of(DType::f32);
    default:
      return MemoryPlan::kAlign * size_of(dtype);
  }
}

}  // namespace moebius
