// What gemm on CUDA keeps on a device.
#pragma once

#include "core/device.h"

namespace moebius::cuda {

// Takes it now instead of at the first product: the library's handle, its workspace, and room for trials of algorithms.
void prepare_gemm(Stream& s);

}  // namespace moebius::cuda
