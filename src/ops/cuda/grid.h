// The limit of a grid that kernels of many rows reach.
#pragma once

#include <cstdint>

namespace moebius::cuda {

// The maximum number of thread blocks in the second dimension of a grid, and in the third. The first has room for
// 2^31 - 1 of them.
inline constexpr int64_t kMaxGridY = 65535;

}  // namespace moebius::cuda
