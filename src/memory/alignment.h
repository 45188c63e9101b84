// The alignment of tensors in the memory plan (memory/plan.h).
#pragma once

#include <cstdint>

#include "core/dtype.h"

namespace moebius {

// Returns the bytes at whose multiples a tensor that is not joined begins and ends.
int64_t align_bytes(DType dtype);

}  // namespace moebius
