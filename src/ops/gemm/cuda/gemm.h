// The state of gemm on a CUDA device, and the algorithms that it chose.
#pragma once

#include <string>

#include "device/device.h"
#include "ops/gemm/gemm.h"

namespace moebius::cuda {

// Device memory that it keeps: cuBLASLt's workspace, room for trials of algorithms, and the answer
// of a comparison.
constexpr int64_t kGemmKeptBytes = (int64_t{128} << 20) + 256;

// Takes it now instead of at the first product: the library's handle, its workspace, and room for
// trials of algorithms.
void prepare_gemm(Stream& s);

// The algorithm that runs this product on the device of s: that of cuBLASLt with its parts by their numbers,
// "tiled_gemm", or "no algorithm chosen yet" before its first run.
std::string gemm_algorithm_text(Stream& s, const Gemm& a);

}  // namespace moebius::cuda
