// What gemm on CUDA keeps on a device.
#pragma once

#include "device/device.h"

namespace moebius::cuda {

// Device memory that it keeps: cuBLASLt's workspace, room for trials of algorithms, and the answer of a comparison.
constexpr int64_t kGemmKeptBytes = (int64_t{128} << 20) + 256;

// Takes it now instead of at the first product: the library's handle, its workspace, and room for trials of algorithms.
void prepare_gemm(Stream& s);

}  // namespace moebius::cuda
