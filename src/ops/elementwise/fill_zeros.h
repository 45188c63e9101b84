// Clears many tensors at once.
#pragma once

#include <span>

#include "core/tensor.h"
#include "device/device.h"

namespace moebius {

// Each x = 0, of any dtype and shape, as fill_zero() does (ops/elementwise/elementwise.h). Some may be empty. On a GPU
// one kernel clears dozens of tensors.
void fill_zeros(Stream& s, std::span<const Tensor> x);

}  // namespace moebius
