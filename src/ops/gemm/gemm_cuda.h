// What gemm on CUDA keeps on a device, for plans of its memory.
#pragma once

#include <cstdint>

namespace moebius::cuda {

// Device memory that the first gemm takes once and keeps: cuBLASLt's workspace, and room for trials of its algorithms.
int64_t gemm_state_bytes();

}  // namespace moebius::cuda
