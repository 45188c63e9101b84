// The maximum sizes of the attention kernels on CUDA.
#pragma once

#include <cstdint>

namespace moebius::cuda {

inline constexpr int64_t kMaxHeadWidth = 256;       // width of queries and keys, and of values
inline constexpr int64_t kMaxHeadsOrBatch = 65535;  // heads, and sequences: dimensions of a grid

}  // namespace moebius::cuda
